"""Random LoRA adapters in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from carryall.exporter.adapter import merge_adapter
from carryall.exporter.safetensors_files import safetensors_of

Array = npt.NDArray[Any]
RANK = 4


def write_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, int]],
    *,
    seed: int = 1,
    rank: int = RANK,
    spread: float = 0.3,
    **settings: Any,
) -> dict[str, Array]:
    """Write an adapter for weights [out, in], of values with a deviation ``spread``; return its matrices."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (outputs, inputs) in modules.items():
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = rng.normal(0, spread, (rank, inputs)).astype(np.float32)
        tensors[f"{prefix}.lora_B.weight"] = rng.normal(0, spread, (outputs, rank)).astype(np.float32)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none", "use_dora": False, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


def layers_of(base: Path) -> dict[str, tuple[int, int]]:
    """Return the shapes [out, in] of the linear layers of a checkpoint, by module."""
    shapes = {name.removesuffix(".weight"): tensor.shape for name, tensor in safetensors_of(base).items()}
    return {name: (shape[0], shape[1]) for name, shape in shapes.items() if name.endswith("_proj")}


def merged(base: Path, adapter: Path) -> dict[str, Array]:
    """Return the weights of a checkpoint with an adapter merged into them."""
    found = merge_adapter(safetensors_of(base), adapter)
    return {name: tensor.read(lambda array: array) for name, tensor in found.items()}


def write_merged(base: Path, adapter: Path, folder: Path) -> Path:
    """Write a checkpoint with an adapter merged into it; return its folder."""
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(merged(base, adapter), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
