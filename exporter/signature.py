"""Sizes of a decoder, read from the inputs and outputs of its graph."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ..contract import LOGITS, PAST_KEY, past_name
from ..errors import GraphError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSignature:
    """Sizes of a decoder graph with the value names of docs/contract.md, portable or lowered."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    kv_dtype: ir.DataType

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        bits = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_dtype.bitwidth
        return bits // 8

    @classmethod
    def of(cls, model: ir.Model) -> DecoderSignature:
        """Read the signature of ``model``.

        Raises:
            GraphError: the graph has no KV cache inputs or no logits, or their shape or dtype is unknown.
        """
        caches = [value for value in model.graph.inputs if PAST_KEY.fullmatch(value.name or "")]
        logits = next((value for value in model.graph.outputs if value.name == LOGITS), None)
        if logits is None or not caches:
            raise GraphError(
                "the graph is not a decoder with an explicit KV cache: "
                f"the input {past_name(0, 'key')} or the output {LOGITS} is missing"
            )
        cache = caches[0]
        if cache.dtype is None:
            raise GraphError(f"input {cache.name} has no element type")
        return cls(
            num_layers=len(caches),
            num_kv_heads=_static(cache, 1),
            head_dim=_static(cache, 3),
            vocab_size=_static(logits, -1),
            kv_dtype=cache.dtype,
        )


def _static(value: ir.Value, axis: int) -> int:
    size = value.shape[axis] if value.shape is not None and len(value.shape) > abs(axis) else None
    if not isinstance(size, int):
        raise GraphError(f"axis {axis} of {value.name} must have a fixed size, found shape {value.shape}")
    return size
