"""The ``carryall`` command: one module per verb, imported on demand."""

from __future__ import annotations

import io
import sys

from ..runtime.process.at_exit import leave_objects
from .group import carryall

__all__ = ["carryall", "main"]


def main() -> None:
    """Run the ``carryall`` script, and end the process with its exit code.

    Characters that the encoding of stdout lacks are written as escapes, as Python does on stderr: a model may
    answer with any, and names of files may be no text.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        carryall.main(prog_name="carryall")
    except SystemExit as end:
        leave_objects(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
