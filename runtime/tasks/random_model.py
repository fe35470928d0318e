"""Decoders with random weights, from a configuration alone: for self-tests and measurements."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...exporter.config import RawConfig
from ...exporter.export import model_from
from ...exporter.weights import Array, Checkpoint, shape_through
from ...storage.stored_tensor import Packed


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


class _RandomCheckpoint(Checkpoint):
    """Has a random tensor of each name and shape that is asked for."""

    def __init__(self, config: RawConfig, seed: int) -> None:
        super().__init__(Path("random weights"), {})
        self._seed, self._layers = seed, int(config.get("num_hidden_layers") or config["n_layer"])

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        view: Callable[[Array], Array] | None = None,
        new_name: str | None = None,
    ) -> ir.LazyTensor:
        """Return a lazy float32 tensor, the same for the same name."""
        view, new_name = view or (lambda array: array), new_name or name

        def read() -> ir.TensorProtocol:
            return ir.tensor(np.ascontiguousarray(view(self._values(name, shape))), name=new_name)

        result = ir.Shape(shape_through(view, shape, np.float32))
        return ir.LazyTensor(read, dtype=ir.DataType.FLOAT, shape=result, name=new_name)

    def packed(self, name: str, shape: tuple[int, ...]) -> Packed | None:
        """Return None: all weights are floats."""
        return None

    def layer_counts(self) -> dict[str, int]:
        """Return the count that the configuration states."""
        return {"layers": self._layers}

    def _values(self, name: str, shape: tuple[int, ...]) -> Array:
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        values = rng.standard_normal(shape, np.float32)
        if len(shape) > 1:
            return values * np.float32(shape[-1] ** -0.5)
        norm = name.endswith("weight")
        return values * np.float32(0.1) + np.float32(norm)
