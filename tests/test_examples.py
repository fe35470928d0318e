"""The examples run, and print what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PROMISES = {
    "batch_table.py": "3 of 3 rows answered",
    "chat.py": "assistant:",
    "custom_pass.py": "next tokens:",
    "generate.py": "log probability",
    "stream.py": "tokens generated",
}


def test_every_example_is_tested() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(PROMISES)


@pytest.mark.parametrize("name", sorted(PROMISES))
def test_example(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "CARRYALL_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    assert PROMISES[name] in done.stdout
