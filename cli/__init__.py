"""The ``carryall`` command: one module per verb, imported on demand."""

from __future__ import annotations

import gc

from .group import carryall

__all__ = ["carryall", "main"]


def main() -> None:
    """Run the ``carryall`` script, and end the process with its exit code."""
    try:
        carryall.main(prog_name="carryall")
    finally:
        gc.freeze()  # the interpreter would visit every object before it ends
