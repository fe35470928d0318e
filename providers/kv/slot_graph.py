"""Read the caches and sizes of a slot graph from the inputs and outputs of an open session."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from ...contract import (
    CONTEXT_LENGTH,
    HIDDEN_STATES,
    INPUT_IDS,
    LAST_HIDDEN_STATE,
    LOGITS,
    LOGITS_POSITIONS,
    LORA_MASK,
    NUM_TOKENS,
    POSITION_IDS,
    SEQLENS_K,
    SLIDING_WINDOWS,
    TOP_LOGITS,
    TOTAL_SEQUENCE_LENGTH,
    is_past,
    lora_down_name,
    lora_up_name,
    present_of,
)
from ...errors import GraphError, UsageError
from ..lora import lora_modules
from .kv_memory import KVSpec

TYPES: Mapping[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
}


@dataclass(frozen=True, slots=True)
class SlotGraph:
    """The interface of a lowered graph; see "The slot graph" in ``docs/contract.md``.

    Args:
        vocab_size: columns of the logits.
        caches: shape of each KV input, by input name.
        context_length: maximum tokens of a sequence, None if the graph does not state it.
        hidden_size: width of the input ``hidden_states``, None if the graph embeds tokens itself.
        top_logits: number of largest logits that the graph returns beside all logits; 0 for none.
        takes_positions: whether positions of new tokens are an input; otherwise they follow from the cache.
        embedding_size: width of the output ``last_hidden_state``, 0 if there is none.
        num_tokens: rows of the embedding table, None if unknown.
        lora_modules: number of inputs and outputs of the modules that adapters can change.
    """

    vocab_size: int
    caches: Mapping[str, KVSpec]
    context_length: int | None
    hidden_size: int | None = None
    top_logits: int = 0
    takes_positions: bool = False
    embedding_size: int = 0
    num_tokens: int | None = None
    lora_modules: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of one token over all layers."""
        return sum(spec.bytes_per_token for spec in self.caches.values())

    @property
    def is_half(self) -> bool:
        """Whether KV is stored in fewer than 32 bits, and activations therefore in 16-bit floats."""
        return any(spec.dtype.itemsize < 4 for spec in self.caches.values())


def read_slot_graph(session: Any, source: str) -> SlotGraph:
    """Return the interface of a lowered graph, read from its session.

    Args:
        session: an open ``onnxruntime.InferenceSession``.
        source: the name of the model in error messages.

    Raises:
        GraphError: the graph is not a slot graph.
    """
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = {value.name: value for value in session.get_outputs()}
    windows = _windows(session, source)
    caches = {
        name: _cache_spec(value, source, windows.get(name)) for name, value in inputs.items() if is_past(name)
    }
    wanted = {INPUT_IDS, SEQLENS_K, TOTAL_SEQUENCE_LENGTH, LOGITS_POSITIONS}
    produced = {LOGITS, *(present_of(name) for name in caches)}
    problems = [f"has no input '{name}'" for name in sorted(wanted - inputs.keys())]
    adapted = lora_modules({name: value.shape for name, value in inputs.items()})
    known = wanted | caches.keys() | {HIDDEN_STATES, POSITION_IDS, LORA_MASK}
    known |= {name for module in adapted for name in (lora_down_name(module), lora_up_name(module))}
    problems += [f"has an unknown input '{name}'" for name in sorted(inputs.keys() - known)]
    problems += [f"has no output '{name}'" for name in sorted(produced - outputs.keys())]
    if not caches:
        problems.append("has no KV cache inputs")
    if problems:
        raise GraphError(
            f"{source} is not lowered to slots ({'; '.join(problems)}); lower it with provider.passes()"
        )
    vocab_size = outputs[LOGITS].shape[-1]
    if not isinstance(vocab_size, int):
        raise GraphError(
            f"{source}: the last axis of 'logits' must be the vocabulary size, not {vocab_size!r}"
        )
    hidden_size = inputs[HIDDEN_STATES].shape[-1] if HIDDEN_STATES in inputs else None
    top_logits = outputs[TOP_LOGITS].shape[-1] if TOP_LOGITS in outputs else 0
    return SlotGraph(
        vocab_size,
        caches,
        stated_number(session, CONTEXT_LENGTH, source),
        hidden_size,
        top_logits,
        takes_positions=POSITION_IDS in inputs,
        num_tokens=stated_number(session, NUM_TOKENS, source),
        lora_modules=adapted,
        embedding_size=outputs[LAST_HIDDEN_STATE].shape[-1] if LAST_HIDDEN_STATE in outputs else 0,
    )


def _cache_spec(value: Any, source: str, window: int | None) -> KVSpec:
    dtype = TYPES.get(value.type)
    if dtype is None:
        raise GraphError(f"{source}: KV input '{value.name}' has the unsupported type {value.type}")
    if len(value.shape) != 4 or not isinstance(value.shape[1], int) or not isinstance(value.shape[3], int):
        raise GraphError(
            f"{source}: KV input '{value.name}' must be [batch, kv_heads, length, head_dim] with known "
            f"kv_heads and head_dim, not {value.shape}"
        )
    return KVSpec(value.shape[1], value.shape[3], np.dtype(dtype), window)


def _windows(session: Any, source: str) -> Mapping[str, int]:
    """Return the sliding window of each KV input that has one, from the metadata."""
    text = session.get_modelmeta().custom_metadata_map.get(SLIDING_WINDOWS, "{}")
    try:
        return {str(name): int(window) for name, window in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise GraphError(f"{source}: the metadata entry '{SLIDING_WINDOWS}' is damaged: {error}") from error


def stated_number(session: Any, key: str, source: str) -> int | None:
    """Return a positive number of the graph's metadata; None if there is no such entry.

    Raises:
        GraphError: the entry is not a positive number.
    """
    text = session.get_modelmeta().custom_metadata_map.get(key)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise GraphError(f"{source}: the metadata entry '{key}' must be a positive number, not {text!r}")
    return int(text)


def chosen_context_length(asked: int | None, stated: int | None, source: str) -> int:
    """Return the maximum tokens of a sequence, given the one asked for and the one the graph states.

    Raises:
        UsageError: neither is known, or ``asked`` is not positive or exceeds ``stated``.
    """
    if asked is not None and stated is not None and asked > stated:
        raise UsageError(f"context length {asked} exceeds {stated}, for which {source} was lowered")
    length = stated if asked is None else asked
    if length is None:
        raise UsageError(f"{source} does not state its context length; set RunnerConfig.context_length")
    if length < 1:
        raise UsageError(f"context length must be positive, not {length}")
    return length
