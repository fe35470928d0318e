"""Time and size of the 4-bit forms of the same weights: carryall's ``int4-fast``, llama.cpp's Q4_K_M."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import models
from environments import python_of, run
from fidelity import fidelity
from measures import Contestant, Figure


def quantizings(folder: Path, model: str) -> Iterator[Figure]:
    """Yield seconds and MB of both, and for real weights their divergence from the float32 model."""
    checkpoint, floats = models.checkpoint(folder, model), models.float_gguf(folder, model)
    peer = python_of(folder, "llama.cpp")
    tool = str(models.WORKERS / "models" / "quantize_llamacpp.py")
    carryall = [sys.executable, "-m", "carryall", "quantize", "-q", "--method", "int4-fast", str(checkpoint)]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = {
            "carryall, int4-fast": (carryall, Path(scratch, "package")),
            "llama.cpp, Q4_K_M": ([str(peer), tool, str(floats)], Path(scratch, "model.gguf")),
        }
        for name, (command, target) in made.items():
            print(f"quantizing with {name}", file=sys.stderr, flush=True)
            start = time.perf_counter()
            run([*command, str(target)])
            yield Figure("quantizing", name, "s", time.perf_counter() - start)
            files = [target] if target.is_file() else [path for path in target.rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files)
            yield Figure("quantized size", name, "MB", size / 1e6)
        if model == models.REAL:
            engines = (("carryall", Path(sys.executable)), ("llamacpp", peer))
            contestants = [
                Contestant(name, python, str(target), "", None, logits)
                for (name, (_, target)), (logits, python) in zip(made.items(), engines, strict=True)
            ]
            yield from fidelity(contestants, checkpoint, python_of(folder, "genai"))
        shutil.rmtree(scratch, ignore_errors=True)
