"""Tools of an agent that repairs a file in the folder of the second argument."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
TASK = f"Repair {FOLDER}/calc.py and run its test."


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: the file.
    """
    return Path(path).read_text()


def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file.

    Args:
        path: the file.
        old: the text to replace.
        new: the text in its place.
    """
    file = Path(path)
    text = file.read_text()
    if old not in text:
        return "the text is not in the file"
    file.write_text(text.replace(old, new))
    return "done"


def shell(command: str) -> str:
    """Run a command in the folder of the task.

    Args:
        command: the command.
    """
    done = subprocess.run(command, shell=True, cwd=FOLDER, capture_output=True, text=True, check=False)  # noqa: S602
    return done.stdout + done.stderr


def check_repaired(answer: object) -> None:
    """Check that the file is right, and that the answer says what the test printed."""
    assert (FOLDER / "calc.py").read_text() == "def add(left, right):\n    return left + right\n"
    assert "The test passes." in str(answer), answer
