"""What runs over ``vulkan_faults.c``, in a process of its own: ``python vulkan_scenarios.py NAME LIBRARY``.

The last line of the output is JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from engine_kit import make_request
from engine_kit import run as run_engine

from carryall.errors import CarryallError
from carryall.graph_opt.pipeline import pipeline
from carryall.providers import get_provider
from carryall.providers.base import Row, RunnerConfig
from carryall.runtime.engine.engine import Engine
from carryall.runtime.tasks import selftest_models as models
from carryall.runtime.tasks.random_model import random_model

_CONTEXT = 4096
_PLENTY = 2**40


def opened(provider: str, folder: Path, slots: int) -> Any:
    """Return a runner of a small decoder; each slot takes 8 MB."""
    target, family = get_provider(provider), models.FAMILIES["llama"]
    make = partial(random_model, {"model_type": "llama", **family, "max_position_embeddings": _CONTEXT})
    config = target.resolve_options(RunnerConfig(max_slots=slots, context_length=_CONTEXT))
    path = folder / f"{provider}.onnx"
    if not path.exists():
        ir.save(pipeline.run(make(), target.passes(config))[0], path, external_data=f"{path.name}.data")
    return target.runner(path, config)


def served(engine: Engine, name: str) -> list[str]:
    """Run a request alone; return its reason and its error."""
    request = make_request(name, [1, 2, 3] * 12)
    run_engine(engine, [request])
    return [str(request.finish_reason), str(request.error)]


def memory_at_load(library: Any, folder: Path) -> list[str]:
    """Open a model whose cache exceeds the memory; return the error, and what another provider computes."""
    library.fault_memory(100 << 20)
    try:
        opened("webgpu", folder, 64)
    except CarryallError as error:
        logits = opened("cpu", folder, 1).forward([Row(0, np.arange(1, 4), 0)])[0]
        return [f"{type(error).__name__}: {error}", str(np.isfinite(logits).all())]
    return ["opened", str(library.fault_refused())]


def memory_in_a_step(library: Any, folder: Path) -> list[list[str]]:
    """Let the memory end before a prompt, and come back; return what became of two requests."""
    engine = Engine(opened("webgpu", folder, 2))
    library.fault_memory(0)
    short = served(engine, "short")
    library.fault_memory(_PLENTY)
    later = served(engine, "later")
    engine.close()
    return [short, later]


def lost(library: Any, folder: Path) -> list[list[str]]:
    """Lose the device within a request; return what became of it and of others, the last one on the CPU."""
    engine = Engine(opened("webgpu", folder, 2))
    before = served(engine, "before")
    library.fault_lose_after(5)
    found = [before, served(engine, "during"), served(engine, "after")]
    engine.close()
    other = Engine(opened("cpu", folder, 2))
    found.append(served(other, "elsewhere"))
    other.close()
    return found


if __name__ == "__main__":
    faults = ctypes.CDLL(sys.argv[2])
    faults.fault_memory.argtypes = [ctypes.c_longlong]
    faults.fault_lose_after.argtypes = [ctypes.c_long]
    with tempfile.TemporaryDirectory() as scratch:
        result = globals()[sys.argv[1]](faults, Path(scratch))
    print(json.dumps(result))
