"""The interface of a lowered decoder: its caches, sizes and abilities, read from an open session."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import ml_dtypes
import numpy as np

from ...contract import (
    CONTEXT_LENGTH,
    ENCODER_ROWS,
    ENCODER_STATES,
    HIDDEN_STATES,
    IMAGE_AHEAD,
    IMAGE_STATES,
    INPUT_IDS,
    LAST_HIDDEN_STATE,
    LAYER_STATES,
    LOGITS,
    LOGITS_POSITIONS,
    LORA_MASK,
    NUM_TOKENS,
    POSITION_IDS,
    ROPE_POSITIONS,
    SEQLENS_K,
    SLIDING_WINDOWS,
    TOP_LOGITS,
    TOTAL_SEQUENCE_LENGTH,
    is_past,
    is_past_encoder,
    is_past_state,
    lora_down_name,
    lora_up_name,
    present_of,
)
from ...errors import GraphError, UsageError
from ...records import dataclass
from ..base import RunnerConfig, RunnerInfo
from ..kv_groups import KVGroups
from ..lora import lora_facts, lora_modules
from .kv_memory import KVSpec

_TYPES: Mapping[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
    "tensor(float8e4m3fn)": ml_dtypes.float8_e4m3fn,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderGraph:
    """The interface of a lowered decoder, whatever memory its caches are in.

    Args:
        inputs: names of all inputs.
        caches: heads, width and type of each KV input, by name, in the order of the graph.
        vocab_size: columns of the logits.
        context_length: maximum tokens of a sequence, None if the graph does not state it.
        hidden_size: width of the input ``hidden_states``, None if the graph embeds tokens itself.
        states: shape of each recurrent state of a sequence, by name; float32.
        hidden_width: width of the output ``last_hidden_state``, 0 if there is none.
        top_logits: number of largest logits that the graph returns beside all logits; 0 for none.
        num_tokens: rows of the embedding table, None if unknown.
        lora_modules: number of inputs and outputs of the modules that adapters can change.
        encoder_caches: heads, width and type of each input with keys or values of an encoder's rows, by name.
        encoder_width: width of the input ``encoder_hidden_states``, 0 if there is none.
        encoder_rows: the most rows of an encoder.
        image_width: width of the input ``image_states``, 0 if there is none.
        image_ahead: whether it has the input ``image_ahead``.
        rope_axes: rows of the input ``rope_positions``, 0 if there is none.
        block_size: positions of a block of the caches; 0 if they have no blocks, or the device chooses it.
        metadata: all metadata of the graph.
    """

    inputs: frozenset[str]
    caches: Mapping[str, KVSpec]
    vocab_size: int
    context_length: int | None
    hidden_size: int | None
    states: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    hidden_width: int = 0
    top_logits: int = 0
    num_tokens: int | None = None
    lora_modules: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    block_size: int = 0
    encoder_caches: Mapping[str, KVSpec] = field(default_factory=dict)
    encoder_width: int = 0
    encoder_rows: int = 0
    image_width: int = 0
    image_ahead: bool = False
    rope_axes: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def takes_positions(self) -> bool:
        """Whether positions of new tokens are an input; otherwise they follow from the cache."""
        return POSITION_IDS in self.inputs

    @property
    def explicit_inputs(self) -> tuple[str, ...]:
        """What a run of explicit KV gets from the run before: caches, states, then an encoder's rows."""
        return (*self.caches, *self.states, *self.encoder_caches)

    @property
    def is_half(self) -> bool:
        """Whether KV is stored in fewer than 32 bits, and activations therefore in 16-bit floats."""
        return any(spec.dtype.itemsize < 4 for spec in self.caches.values())

    def info(
        self,
        config: RunnerConfig,
        groups: KVGroups,
        *,
        length: int,
        slots: int | None = None,
        **abilities: Any,
    ) -> RunnerInfo:
        """Return the info of a runner of this graph.

        Args:
            config: options of the runner.
            groups: the groups of layers.
            length: maximum tokens of a sequence.
            slots: number of slots, if it is not that of ``config``.
            abilities: further fields.
        """
        layer_states = int(self.metadata.get(LAYER_STATES, 0))
        return RunnerInfo(
            vocab_size=self.vocab_size,
            context_length=length,
            max_slots=slots or config.max_slots,
            kv_groups=groups,
            embedding_size=self.hidden_width - layer_states,
            layer_states=layer_states,
            top_logits=self.top_logits,
            num_tokens=self.num_tokens,
            image_width=self.image_width,
            image_ahead=self.image_ahead,
            rope_axes=self.rope_axes,
            encoder_width=self.encoder_width,
            encoder_rows=self.encoder_rows,
            **lora_facts(self.lora_modules, config),
            **abilities,
        )


def read_graph(session: Any, source: str, *, heads_axis: int = 1) -> DecoderGraph:
    """Return the interface of a lowered decoder, read from its session.

    Args:
        session: an open ``onnxruntime.InferenceSession``.
        source: the name of the model in error messages.
        heads_axis: the axis of a cache that holds its heads; that of positions is the other one of 1 and 2.

    Raises:
        GraphError: it is not a decoder, or its caches have unknown sizes.
    """
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = {value.name: value for value in session.get_outputs()}
    if LOGITS not in outputs:
        raise GraphError(
            f"{source} has no output '{LOGITS}'; lower a portable decoder with provider.passes()"
        )
    windows = _windows(session, source)
    caches = {
        name: _cache_spec(value, source, windows.get(name), heads_axis)
        for name, value in inputs.items()
        if is_past(name)
    }
    states = {name: _state_shape(value, source) for name, value in inputs.items() if is_past_state(name)}
    positions = {inputs[name].shape[3 - heads_axis] for name in caches}
    size = positions.pop() if len(positions) == 1 else 0
    return DecoderGraph(
        inputs=frozenset(inputs),
        caches=caches,
        vocab_size=known_size(outputs[LOGITS].shape[-1], source),
        context_length=_stated_number(session, CONTEXT_LENGTH, source),
        hidden_size=inputs[HIDDEN_STATES].shape[-1] if HIDDEN_STATES in inputs else None,
        states=states,
        hidden_width=outputs[LAST_HIDDEN_STATE].shape[-1] if LAST_HIDDEN_STATE in outputs else 0,
        top_logits=outputs[TOP_LOGITS].shape[-1] if TOP_LOGITS in outputs else 0,
        num_tokens=_stated_number(session, NUM_TOKENS, source),
        lora_modules=lora_modules({name: value.shape for name, value in inputs.items()}),
        block_size=size if isinstance(size, int) else 0,
        encoder_caches={
            name: _cache_spec(value, source, None, heads_axis)
            for name, value in inputs.items()
            if is_past_encoder(name)
        },
        encoder_width=inputs[ENCODER_STATES].shape[-1] if ENCODER_STATES in inputs else 0,
        encoder_rows=_stated_number(session, ENCODER_ROWS, source) or 0,
        image_width=inputs[IMAGE_STATES].shape[-1] if IMAGE_STATES in inputs else 0,
        image_ahead=IMAGE_AHEAD in inputs,
        rope_axes=inputs[ROPE_POSITIONS].shape[0] if ROPE_POSITIONS in inputs else 0,
        metadata=session.get_modelmeta().custom_metadata_map,
    )


def read_slot_graph(session: Any, source: str) -> DecoderGraph:
    """Return the interface of a graph with slots; see "The slot graph" in ``docs/contract.md``.

    Raises:
        GraphError: the graph has no slots.
    """
    inputs = {value.name for value in session.get_inputs()}
    outputs = {value.name for value in session.get_outputs()}
    caches = {name for name in inputs if is_past(name)}
    wanted = {INPUT_IDS, SEQLENS_K, TOTAL_SEQUENCE_LENGTH, LOGITS_POSITIONS}
    produced = {LOGITS, *map(present_of, caches)}
    problems = [f"has no input '{name}'" for name in sorted(wanted - inputs)]
    known = wanted | caches | {HIDDEN_STATES, POSITION_IDS, LORA_MASK}
    adapted = lora_modules({value.name: value.shape for value in session.get_inputs()})
    known |= {name for module in adapted for name in (lora_down_name(module), lora_up_name(module))}
    problems += [f"has an unknown input '{name}'" for name in sorted(inputs - known)]
    problems += [f"has no output '{name}'" for name in sorted(produced - outputs)]
    if not caches:
        problems.append("has no KV cache inputs")
    if problems:
        raise GraphError(
            f"{source} is not lowered to slots ({'; '.join(problems)}); lower it with provider.passes()"
        )
    return read_graph(session, source)


def known_size(size: object, source: str) -> int:
    """Return the vocabulary size, given the last axis of ``logits``.

    Raises:
        GraphError: the axis is not a fixed size.
    """
    if not isinstance(size, int):
        raise GraphError(f"{source}: the last axis of 'logits' must be the vocabulary size, not {size!r}")
    return size


def _cache_spec(value: Any, source: str, window: int | None, heads_axis: int) -> KVSpec:
    dtype = _TYPES.get(value.type)
    if dtype is None:
        raise GraphError(f"{source}: KV input '{value.name}' has the unsupported type {value.type}")
    heads, width = (value.shape[heads_axis], value.shape[3]) if len(value.shape) == 4 else (None, None)
    if not isinstance(heads, int) or not isinstance(width, int):
        raise GraphError(
            f"{source}: KV input '{value.name}' must be [batch, kv_heads, length, head_dim] with known "
            f"kv_heads and head_dim, not {value.shape}"
        )
    return KVSpec(heads, width, np.dtype(dtype), window)


def _state_shape(value: Any, source: str) -> tuple[int, ...]:
    shape = tuple(value.shape[1:])
    if value.type != "tensor(float)" or not all(isinstance(size, int) for size in shape):
        raise GraphError(
            f"{source}: the state '{value.name}' must be float32 of known sizes, "
            f"not {value.type} {value.shape}"
        )
    return shape


def _windows(session: Any, source: str) -> Mapping[str, int]:
    """Return the sliding window of each KV input that has one, from the metadata."""
    text = session.get_modelmeta().custom_metadata_map.get(SLIDING_WINDOWS, "{}")
    try:
        return {str(name): int(window) for name, window in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise GraphError(f"{source}: the metadata entry '{SLIDING_WINDOWS}' is damaged: {error}") from error


def _stated_number(session: Any, key: str, source: str) -> int | None:
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
