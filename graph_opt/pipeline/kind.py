"""Find out from a graph whether it generates tokens."""

from __future__ import annotations

import onnx_ir as ir

from ...contract import (
    ATTENTION_MASK,
    CACHE,
    CACHE_ROWS,
    HIDDEN_STATES,
    INPUT_IDS,
    LOGITS_POSITIONS,
    POSITION_IDS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
)
from ..analysis.decoder_inputs import first_cache, is_decoder
from ..passes.importing.token_names import TokenNamesPass
from .canonical import canonical_passes

_TOKENS = frozenset({INPUT_IDS, ATTENTION_MASK, POSITION_IDS})
# Inputs of parts of a split model, and of graphs lowered to slots.
_OTHERS = frozenset({HIDDEN_STATES, SEQLENS_K, TOTAL_SEQUENCE_LENGTH, LOGITS_POSITIONS, CACHE_ROWS})


def generates(model: ir.Model) -> bool:
    """Return whether a graph generates tokens: it maps token ids and KV caches to logits and KV caches.

    Caches may be missing if ``AddCachePass`` can add them. Encoders, and decoders with cross attention, do
    not generate in this sense.

    Args:
        model: the model; it may be changed, so pass a copy.
    """
    graph = model.graph
    if not is_decoder(graph):
        TokenNamesPass()(model)
    if not is_decoder(graph):
        return False
    if _follows_contract(graph):
        return True
    for pass_ in canonical_passes():
        model = pass_(model).model
    return _follows_contract(model.graph)


def _follows_contract(graph: ir.Graph) -> bool:
    if not is_decoder(graph) or first_cache(graph) is None:
        return False
    names = [str(value.name) for value in graph.inputs if not value.is_initializer()]
    return all(name in _TOKENS | _OTHERS or CACHE.fullmatch(name) for name in names)
