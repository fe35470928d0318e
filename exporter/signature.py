"""Sizes of a decoder, read from the inputs and outputs of its graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..contract import LOGITS, PAST_KEY, past_name
from ..errors import GraphError
from ..records import dataclass

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSignature:
    """Sizes of a decoder graph with the value names of docs/contract.md, portable or lowered.

    Args:
        caches: number and size of the heads in each cache of keys, in the order of the layers that have one.
        vocab_size: columns of the logits.
        kv_dtype: element type of the caches.
    """

    caches: tuple[tuple[int, int], ...]
    vocab_size: int
    kv_dtype: ir.DataType

    @property
    def num_layers(self) -> int:
        """Number of layers with a cache."""
        return len(self.caches)

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads of the layer that has the most."""
        return max(heads for heads, _ in self.caches)

    @property
    def head_dim(self) -> int:
        """Elements of the largest head."""
        return max(size for _, size in self.caches)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * sum(heads * size for heads, size in self.caches) * self.kv_dtype.bitwidth // 8

    @classmethod
    def of(cls, model: ir.Model, *, head_dim: int | None = None) -> DecoderSignature:
        """Read the signature of ``model``.

        Args:
            model: the graph.
            head_dim: elements of the heads of which the graph does not state the number, if that is known.

        Raises:
            GraphError: the graph has no KV cache inputs or no logits, or their shape or dtype is unknown.
        """
        found = [(PAST_KEY.fullmatch(value.name or ""), value) for value in model.graph.inputs]
        caches = {int(match[1]): value for match, value in found if match is not None}
        logits = next((value for value in model.graph.outputs if value.name == LOGITS), None)
        if logits is None or not caches:
            raise GraphError(
                "the graph is not a decoder with an explicit KV cache: "
                f"the input {past_name(0, 'key')} or the output {LOGITS} is missing"
            )
        ordered = [caches[layer] for layer in sorted(caches)]
        if ordered[0].dtype is None:
            raise GraphError(f"input {ordered[0].name} has no element type")
        return cls(
            caches=tuple((_static(cache, 1), _static(cache, 3, head_dim)) for cache in ordered),
            vocab_size=_static(logits, -1),
            kv_dtype=ordered[0].dtype,
        )


def _static(value: ir.Value, axis: int, known: int | None = None) -> int:
    size = value.shape[axis] if value.shape is not None and len(value.shape) > abs(axis) else None
    if not isinstance(size, int) and value.shape is not None and known is not None:
        return known
    if not isinstance(size, int):
        raise GraphError(f"axis {axis} of {value.name} must have a fixed size, found shape {value.shape}")
    return size
