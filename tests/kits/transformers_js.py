"""transformers.js of the npm registry, downloaded on demand into the folder of the model zoo."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import zoo

VERSION = "4.3.1"
_TIMEOUT = 500  # seconds for a download


def library() -> Path:
    """Return a folder whose ``node_modules`` holds transformers.js, or skip the test."""
    npm, folder = shutil.which("npm"), zoo.folder() / f"transformers-js-{VERSION}"
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node.js and npm are not installed")
    if not (folder / "node_modules" / "@huggingface").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts"]
        command = [npm, "install", *options, f"@huggingface/transformers@{VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        if done.returncode:
            pytest.skip(f"transformers.js cannot be installed: {done.stderr[-200:]}")
    return folder
