"""Decoders with random weights, from a configuration alone: for self-tests and measurements."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...exporter.config import RawConfig
from ...exporter.export import model_from
from ...exporter.image_processor import tower_module
from ...exporter.weights import Checkpoint
from ...records import dataclass
from ...storage.stored_tensor import Array, Packed, StoredTensor


def random_model(config: RawConfig, seed: int = 0) -> ir.Model:
    """Return the portable graph of a decoder with random float32 weights.

    Matrices have the variance 1 / columns, so that activations keep their size through the layers.

    Args:
        config: the content of a config.json.
        seed: of the weights.

    Raises:
        UnsupportedModelError: the model family, or an option of its configuration, is not supported.
        CheckpointError: the configuration is not valid.
    """
    return model_from(config, _RandomCheckpoint(config, seed))


def random_tower(config: RawConfig, seed: int = 0) -> ir.Model:
    """Return the portable ``vision.onnx`` of a model that sees, with weights as those of ``random_model``.

    Args:
        config: the content of a config.json.
        seed: of the weights.

    Raises:
        UnsupportedModelError: an option of the configuration is not supported.
        CheckpointError: the configuration is not valid.
    """
    model: ir.Model = tower_module(config).vision_model(config, _RandomCheckpoint(config, seed))
    return model


class _RandomCheckpoint(Checkpoint):
    """Has a random tensor of each name and shape that is asked for."""

    def __init__(self, config: RawConfig, seed: int) -> None:
        super().__init__(Path("random weights"), {})
        self._seed = seed
        self._layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)

    def _stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        return _RandomTensor(self.source, name, shape, self._seed)

    def layer_counts(self) -> dict[str, int]:
        """Return the count that the configuration states."""
        return {"layers": self._layers}


@dataclass(frozen=True)
class _RandomTensor:
    """A tensor whose values depend on its name and the seed."""

    path: Path
    name: str
    shape: tuple[int, ...]
    seed: int
    dtype = np.dtype(np.float32)
    packed: ClassVar[Packed | None] = None
    halves: ClassVar[None] = None

    def read(self, view: Callable[[Array], Array]) -> npt.NDArray[np.float32]:
        """Return a view of the values."""
        return np.ascontiguousarray(view(self._values()))

    def _values(self) -> Array:
        rng = np.random.default_rng([self.seed, zlib.crc32(self.name.encode())])
        values = rng.standard_normal(self.shape, np.float32)
        if len(self.shape) > 1:
            return values * np.float32(self.shape[-1] ** -0.5)
        norm = self.name.endswith("weight")
        return values * np.float32(0.1) + np.float32(norm)
