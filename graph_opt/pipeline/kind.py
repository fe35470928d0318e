"""What a graph is, read from the graph: one that generates tokens, or any other model."""

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
# What parts of a split model take, and graphs lowered to slots.
_OTHERS = frozenset({HIDDEN_STATES, SEQLENS_K, TOTAL_SEQUENCE_LENGTH, LOGITS_POSITIONS, CACHE_ROWS})


def generates(model: ir.Model) -> bool:
    """Return whether a graph generates tokens: token ids and KV caches in, logits and caches out.

    Caches may be missing where ``AddCachePass`` proves that they can be added. An encoder of tokens, or a
    decoder that attends to anything else than its own tokens, does not count.

    Args:
        model: a graph of its own, which this may change.
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
