"""Names of graph values and metadata, shared by exporters, passes, lowerings and runners.

``docs/contract.md`` gives their shapes and dtypes. This module imports nothing of carryall.
"""

from __future__ import annotations

import re

INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
POSITION_IDS = "position_ids"
LOGITS = "logits"

# Of text encoders. Lowered decoders may have the hidden states too.
TOKEN_TYPE_IDS = "token_type_ids"  # noqa: S105
LAST_HIDDEN_STATE = "last_hidden_state"
TERM_WEIGHTS = "term_weights"  # [batch, vocabulary]: what a text says of each token of the vocabulary
TOKEN_WEIGHTS = "token_weights"  # [batch, sequence, 1] # noqa: S105
TOKEN_VECTORS = "token_vectors"  # [batch, sequence, size] # noqa: S105

# Of vision.onnx: patches of pictures to rows of the decoder's input.
PIXELS = "pixels"
PATCH_POSITIONS = "patch_positions"
GROUPS, GROUP_ROWS = "groups", "group_rows"
WINDOWS, WINDOW_ROWS = "windows", "window_rows"  # as the two above, for layers that attend within windows
PATCH_COS, PATCH_SIN = "patch_cos", "patch_sin"
TABLE_ROWS, TABLE_WEIGHTS = "table_rows", "table_weights"
POSITION_WEIGHTS = "position_weights"  # the part of each entry of the table of positions in that of a patch
MERGED_PATCHES = "merged_patches"
IMAGE_STATES = "image_states"  # its output, and an input of a decoder lowered for a model that sees
IMAGE_ROWS = "image_rows"  # the row of image_states that replaces a token's embedding, -1 for none

# Of encoder-decoders: the rows of encoder.onnx that cross-attention reads, new ones only, and which of all
# are real.
ENCODER_STATES = "encoder_hidden_states"
ENCODER_MASK = "encoder_attention_mask"
ALIGNMENT = "alignment"  # output of a graph that tells where tokens attend to in the encoder's rows

# Of audio.onnx: log-mel frames [windows, mels, frames], and its output [windows, positions, width].
AUDIO_FEATURES, AUDIO_STATES = "input_features", "audio_states"

IMAGE_AHEAD = "image_ahead"  # how many tokens behind a token it sees too, those of its picture; int32
ROPE_POSITIONS = "rope_positions"  # positions in time, height and width, for a decoder of ``ROPE_AXES``

# Only in lowered graphs.
# By row, where its new rows of the encoder begin, how many it has in all, and their blocks; int32.
ENCODER_BEGINS, ENCODER_LENGTHS, ENCODER_TABLE = "encoder_begins", "encoder_lengths", "encoder_block_table"
SEQLENS_K = "seqlens_k"
TOTAL_SEQUENCE_LENGTH = "total_sequence_length"
LOGITS_POSITIONS = "logits_positions"
HIDDEN_STATES = "hidden_states"  # the input of a later part of a split model, in place of token ids
LORA_MASK = "lora_mask"  # which columns of the low-rank products belong to the adapter of each batch row
TOP_LOGITS, TOP_TOKEN_IDS, LOGSUMEXP = "top_logits", "top_token_ids", "logsumexp"
# How a device draws each wanted token (columns: DRAW_COLUMNS), the tokens that it drew, those of the run
# before, and the place among these of each token whose id in ``input_ids`` is negative.
DRAW, DRAWN, DRAWN_BEFORE, TOKEN_SOURCES = "draw", "drawn_tokens", "drawn_before", "token_sources"
DRAW_COLUMNS = ("inverse_temperature", "top_k", "top_p", "min_p", "uniform")

PRODUCER = "carryall"  # of a graph in the contract's form

# Only in graphs on their way to a target whose kernels take it, of the domain EXPERTS_DOMAIN: the experts of
# a layer as they are stored, in stacks, in place of the nodes of each; see docs/contract.md.
EXPERT_STACKS, EXPERTS_DOMAIN = "ExpertStacks", "carryall"

# Keys of a model's metadata.
CONTEXT_LENGTH = "context_length"
SLIDING_WINDOWS = "sliding_windows"
LAYER_STATES = "layer_states"  # how many columns of ``last_hidden_state`` are states of layers, the last ones
EXPLICIT_KV = "explicit_kv"  # why a lowered graph keeps past in, present out
SLOT_KV = "slot_kv"  # why a lowered graph has KV in slots, where blocks are the default
ROPE_AXES = "rope_axes"  # JSON: by rotary frequency, the axis of ``rope_positions`` that it turns with
# JSON: values of the residual stream, in order. The columns of ``image_states`` behind those of the embedding
# are added to them, for the tokens of pictures.
DEEP_STATES = "deep_image_states"
SEEN_EMBEDDING = "image_embedding"  # the value whose rows pictures replace; without it, the rows of the table
IMAGE_PAD = "image_pad_token"  # the token that further tables look up in place of those of pictures
AHEAD_WINDOWS = "image_ahead_windows"  # JSON: windows, or null, of the layers whose tokens see by IMAGE_AHEAD
ENCODER_ROWS = "encoder_rows"  # the most rows of an encoder to which a sequence attends
NUM_TOKENS = "num_tokens"  # number of rows of the embedding table
TEXT_REDUCTIONS = "text_reductions"  # JSON: outputs [1, tokens, ...] to add or maximise over each text
TEXT_FORM = "text_form"  # JSON: ``exporter/encoders/text_form.py``

# Caches are past_key_values.N.key and .value, and present.N.key and .value.
PAST, PRESENT = "past_key_values", "present"
KINDS = ("key", "value")
PAST_KEY = re.compile(rf"{PAST}\.(\d+)\.key")
# Keys and values of cross-attention, whose positions are the encoder's rows: past_encoder.N.key and .value
# [batch, heads, rows, head size], with outputs present_encoder.N.key and .value.
_PAST_ENCODER = re.compile(r"past_encoder\.(\d+)\.(key|value)")
CACHE = re.compile(rf"{PAST}\.(\d+)\.(key|value)")
# Recurrent states of fixed size, which have no positions: past_conv.N [batch, channels, taps - 1] and
# past_recurrent.N [batch, heads, key size, value size], with outputs present_conv.N and present_recurrent.N.
STATE_KINDS = ("conv", "recurrent")
PAST_STATE = re.compile(r"past_(conv|recurrent)\.(\d+)")
STATES_OPSET = 27  # the first opset with LinearAttention and CausalConvWithState
PRESENT_CACHE = re.compile(rf"{PRESENT}\.(\d+)\.(key|value)")

_LORA = "lora"
_LORA_DOWN = re.compile(rf"{_LORA}\.(.+)\.down")


def past_name(layer: int | str, kind: str) -> str:
    """Return the input name of a layer's cache; ``kind`` is ``key`` or ``value``."""
    return f"{PAST}.{layer}.{kind}"


def present_name(layer: int | str, kind: str) -> str:
    """Return the output name of a layer's updated cache."""
    return f"{PRESENT}.{layer}.{kind}"


def is_past(name: str | None) -> bool:
    """Whether a name is that of a cache input."""
    return str(name).startswith(f"{PAST}.")


def is_present(name: str | None) -> bool:
    """Whether a name is that of a cache output."""
    return str(name).startswith(f"{PRESENT}.")


def past_encoder_name(layer: int, kind: str) -> str:
    """Return the input name of a layer's ``key`` or ``value`` of the encoder's rows."""
    return f"past_encoder.{layer}.{kind}"


def present_encoder_name(layer: int, kind: str) -> str:
    """Return the output name of a layer's ``key`` or ``value`` of the encoder's rows."""
    return f"present_encoder.{layer}.{kind}"


def is_past_encoder(name: str | None) -> bool:
    """Whether a name is that of an input with keys or values of the encoder's rows."""
    return _PAST_ENCODER.fullmatch(str(name)) is not None


def past_state_name(layer: int | str, kind: str) -> str:
    """Return the input name of a layer's recurrent state; ``kind`` is ``conv`` or ``recurrent``."""
    return f"past_{kind}.{layer}"


def present_state_name(layer: int | str, kind: str) -> str:
    """Return the output name of a layer's updated recurrent state."""
    return f"present_{kind}.{layer}"


def is_past_state(name: str | None) -> bool:
    """Whether a name is that of an input with a recurrent state."""
    return PAST_STATE.fullmatch(str(name)) is not None


def present_of(past: str) -> str:
    """Return the output name of a cache input, or of a recurrent state."""
    if is_past_encoder(past):
        return past.replace("past_", "present_", 1)
    state = PAST_STATE.fullmatch(past)
    return past.replace(PAST, PRESENT, 1) if state is None else present_state_name(state[2], state[1])


def lora_down_name(module: str) -> str:
    """Return the input name of the matrices A of all adapters for a module, such as ``layers.0.q_proj``."""
    return f"{_LORA}.{module}.down"


def lora_up_name(module: str) -> str:
    """Return the input name of the matrices B of all adapters for a module."""
    return f"{_LORA}.{module}.up"


def lora_module(name: str | None) -> str | None:
    """Return the module whose matrices A are the input ``name``; None for other inputs."""
    found = _LORA_DOWN.fullmatch(str(name))
    return None if found is None else found[1]
