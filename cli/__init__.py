"""The ``carryall`` command: one module per verb, imported on demand."""

from __future__ import annotations

from .group import carryall

__all__ = ["carryall", "main"]


def main() -> None:
    """Run the ``carryall`` script, and end the process with its exit code."""
    carryall.main(prog_name="carryall")
