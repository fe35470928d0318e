"""What loading a model reads of its graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from ..contract import CONTEXT_LENGTH, LOGITS_POSITIONS, SEQLENS_K
from ..errors import GraphError
from ..records import dataclass
from .signature import DecoderSignature

if TYPE_CHECKING:
    import onnx_ir as ir

_LOWERED_INPUTS = (SEQLENS_K, LOGITS_POSITIONS, "block_indices")


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The sizes of a decoder that decide how much memory it needs.

    Args:
        head_dim: elements of the largest head.
        vocab_size: columns of the logits.
        kv_bytes_per_token: bytes of one token's keys and values over all layers.
    """

    head_dim: int
    vocab_size: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """Facts of a graph, independent of the provider.

    Args:
        lowered: whether the graph was already lowered for a provider.
        sizes: None if the graph is not a decoder.
        position_limit: the number of rows of its shortest table of positions, None if it has none.
        stated_length: the context length that its metadata states, as text; None if they state none.
    """

    lowered: bool
    sizes: DecoderSizes | None
    position_limit: int | None
    stated_length: str | None

    @classmethod
    def of(cls, model: ir.Model) -> Self:
        """Return the facts of a graph."""
        from ..graph_opt.graph.graph_facts import position_limit

        return cls(
            lowered=any(value.name in _LOWERED_INPUTS for value in model.graph.inputs),
            sizes=_sizes(model),
            position_limit=position_limit(model.graph),
            stated_length=model.metadata_props.get(CONTEXT_LENGTH),
        )

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> Self:
        """Return the facts that ``dataclasses.asdict`` has made JSON of."""
        sizes = known["sizes"]
        return cls(**{**known, "sizes": None if sizes is None else DecoderSizes(**sizes)})

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        return dataclasses.asdict(self)


def _sizes(model: ir.Model) -> DecoderSizes | None:
    try:
        signature = DecoderSignature.of(model)
    except GraphError:
        return None
    return DecoderSizes(signature.head_dim, signature.vocab_size, signature.kv_bytes_per_token)
