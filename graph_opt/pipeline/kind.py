"""Find out from a graph whether it generates tokens, and if it does not, why."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ...contract import (
    ATTENTION_MASK,
    CACHE,
    HIDDEN_STATES,
    INPUT_IDS,
    LOGITS,
    LOGITS_POSITIONS,
    POSITION_IDS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
)
from ..analysis.decoder_inputs import find_input, first_cache, is_decoder
from ..passes.base import GraphPass, Refusal
from ..passes.importing.token_names import TokenNamesPass
from .canonical import canonical_passes

_TOKENS = frozenset({INPUT_IDS, ATTENTION_MASK, POSITION_IDS})
# Inputs of parts of a split model, and of graphs lowered to slots.
_OTHERS = frozenset({HIDDEN_STATES, SEQLENS_K, TOTAL_SEQUENCE_LENGTH, LOGITS_POSITIONS})


def not_generating(model: ir.Model) -> str | None:
    """Return why a graph does not generate tokens, None if it does.

    A graph generates if it maps token ids and KV caches to logits and KV caches. Caches may be missing if
    ``AddCachePass`` can add them. Encoders, and decoders with cross attention, do not generate in this sense.

    Args:
        model: the model; it may be changed, so pass a copy.
    """
    graph = model.graph
    if not is_decoder(graph):
        TokenNamesPass()(model)
    if not is_decoder(graph):
        missing = [f"no input {INPUT_IDS}"] if find_input(graph, INPUT_IDS) is None else []
        missing += [] if any(value.name == LOGITS for value in graph.outputs) else [f"no output {LOGITS}"]
        return f"the graph has {' and '.join(missing)}"
    if _follows_contract(graph):
        return None
    refusals: dict[str, list[Refusal]] = {}
    for pass_ in canonical_passes():
        model = pass_(model).model
        if isinstance(pass_, GraphPass):
            refusals.setdefault(pass_.name, []).extend(pass_.refusals)
    return None if _follows_contract(model.graph) else _reason(model.graph, refusals)


def _follows_contract(graph: ir.Graph) -> bool:
    return is_decoder(graph) and first_cache(graph) is not None and not _other_inputs(graph)


def _other_inputs(graph: ir.Graph) -> list[str]:
    names = [str(value.name) for value in graph.inputs if not value.is_initializer()]
    return [name for name in names if name not in _TOKENS | _OTHERS and not CACHE.fullmatch(name)]


def _reason(graph: ir.Graph, refusals: Mapping[str, list[Refusal]]) -> str:
    """Return why the canonical passes did not bring a graph with token ids and logits to the contract."""
    others = _other_inputs(graph)
    if others:
        unknown = f"its input {others[0]} is no token ids, mask, positions or KV cache"
        return "; ".join([unknown, *_first_of("LiftStaticCache", refusals)])
    for refused in _first_of("AddCache", refusals):
        return refused
    for refused in _first_of("FuseAttention", refusals):
        return f"it has no KV cache, and no attention to add one to: {refused}"
    return "it has no KV cache, and no attention to add one to"


def _first_of(name: str, refusals: Mapping[str, list[Refusal]]) -> list[str]:
    """Return the first refusal of a pass as one text, or nothing."""
    return [f"{name} refused {one.node}: {one.reason}" for one in refusals.get(name, [])[:1]]
