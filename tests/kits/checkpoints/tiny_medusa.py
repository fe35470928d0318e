"""Tiny Medusa heads, and what they guess, in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

Array = npt.NDArray[Any]

FILE = "medusa_lm_head.safetensors"
COUNT, BLOCKS = 3, 2


def write_medusa(folder: Path, hidden: int = 32, vocab: int = 260) -> Path:
    """Write random heads."""
    rng, tensors = np.random.default_rng(51), {}
    for head in range(COUNT):
        for block in range(BLOCKS):
            tensors[f"{head}.{block}.linear.weight"] = rng.standard_normal((hidden, hidden)) * 0.2
            tensors[f"{head}.{block}.linear.bias"] = rng.standard_normal(hidden) * 0.2
        tensors[f"{head}.{BLOCKS}.weight"] = rng.standard_normal((vocab, hidden))
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: a.astype(ml_dtypes.bfloat16) for n, a in tensors.items()}, folder / FILE)
    return folder


def medusa_logits(folder: Path, state: Array) -> Array:
    """Return the logits [heads, vocab] for a hidden state [hidden]."""
    tensors = {name: array.astype(np.float64) for name, array in load_file(folder / FILE).items()}
    logits = []
    for head in range(COUNT):
        x = state.astype(np.float64)
        for block in range(BLOCKS):
            y = tensors[f"{head}.{block}.linear.weight"] @ x + tensors[f"{head}.{block}.linear.bias"]
            x = x + y / (1 + np.exp(-y))
        logits.append(tensors[f"{head}.{BLOCKS}.weight"] @ x)
    return np.stack(logits)
