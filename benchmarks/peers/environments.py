"""Create the Python environment of each engine with pinned packages.

The wheels of the engines overwrite each other's libraries, so each engine has its own environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Packages of one tuple are installed together, tuples one after the other: a CPU build of torch that is there
# already satisfies the packages that would download the CUDA build.
PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "openvino": (("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "numpy"),),
    "genai": (
        ("torch==2.13.0",),
        ("transformers==5.23.0", "onnxruntime==1.31.1", "onnxruntime-genai==0.18.0", "onnx-ir", "gguf"),
    ),
    "optimum": (
        ("torch==2.13.0", "torchvision==0.28.0"),
        ("optimum-intel[openvino]==2.2.0", "optimum==2.3.0", "transformers==5.5.4", "nncf==3.4.0"),
    ),
    "llama.cpp": (("llama-cpp-python==0.3.36", "numpy"),),  # compiles llama.cpp: about 10 minutes
}
_UNWANTED = {"optimum": "torchvision"}  # its CUDA build cannot be imported beside a CPU build of torch


def python_of(folder: Path, name: str) -> Path:
    """Return the interpreter of an environment; create it if its packages differ from ``PACKAGES``.

    Raises:
        RuntimeError: pip failed; the message has the end of its output.
    """
    home = folder / "environments" / name
    python, record = home / "bin" / "python", home / "packages.json"
    wanted = json.dumps(PACKAGES[name])
    if record.is_file() and record.read_text() == wanted:
        return python
    print(f"creating the environment {name}", file=sys.stderr, flush=True)
    run([sys.executable, "-m", "venv", "--clear", str(home)])
    for packages in PACKAGES[name]:
        run([str(python), "-m", "pip", "install", "-q", *packages])
    if name in _UNWANTED:
        run([str(python), "-m", "pip", "uninstall", "-q", "-y", _UNWANTED[name]])
    record.write_text(wanted)
    return python


def run(command: list[str], cwd: Path | None = None) -> None:
    """Run a command quietly.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stdout + done.stderr)[-2000:]
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(command)}\n{output}")
