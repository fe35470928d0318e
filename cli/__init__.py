"""The ``carryall`` command: one module a verb, imported on demand."""

from __future__ import annotations

from .group import carryall

__all__ = ["carryall", "main"]


def main() -> None:
    """Entry point of the ``carryall`` script; ends the process with the exit code."""
    carryall.main(prog_name="carryall")
