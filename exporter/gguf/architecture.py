"""What one architecture of GGUF files has other than the rest: names, keys and forms of tensors.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import CheckpointError
from ...storage.stored_tensor import Array

_BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BARE = ("self_attn.sinks",)  # parameters whose names have no suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The differences of one GGUF architecture from the common names.

    Args:
        model_type: the model family, a module of ``exporter/models``.
        inner: names of a layer's modules that differ from the common ones.
        outer: the same of modules outside of layers.
        parameters: names of a layer's parameters that are not a module's weight or bias.
        views: by the end of a name of Hugging Face, the function that makes its tensor of the stored one.
        channels: ends of names of convolutions, whose stored [channels, taps] is [channels, 1, taps].
        plain_norms: ends of names of norms without ``norm_offset``.
        rotates_pairs: whether rows of q and k are ordered for a rope that rotates adjacent elements.
        norm_offset: offset that the file's norm weights include.
        experts: whether its layers are mixtures of experts, whose weights are stacked.
        keys: further metadata, without the prefix, and the keys of config.json.
        adapt: returns keys of config.json that are computed from others.
    """

    model_type: str
    inner: Mapping[str, str] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    views: Mapping[str, Callable[[Array], Array]] = field(default_factory=dict)
    channels: tuple[str, ...] = ()
    plain_norms: tuple[str, ...] = ()
    rotates_pairs: bool = False
    norm_offset: float = 0.0
    experts: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    adapt: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}


def tensor_name(name: str, known: Architecture) -> str:
    """Return Hugging Face's name of a tensor; unknown names are unchanged."""
    whole = _BLOCK.fullmatch(name)
    if whole is not None and whole[2] in known.parameters:
        return f"model.layers.{whole[1]}.{known.parameters[whole[2]]}"
    stem, dot, suffix = name.rpartition(".")
    match = _BLOCK.fullmatch(stem)
    if match is None:
        outer = {**_OUTER, **known.outer}
        return f"{outer[stem]}.{suffix}" if stem in outer else name
    inner = {**_INNER, **known.inner}.get(match[2])
    if inner is None:
        return name
    return f"model.layers.{match[1]}.{inner}" + ("" if inner in _BARE else f"{dot}{suffix}")


def stated(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key of config.json that the metadata must give.

    Raises:
        CheckpointError: it gives none.
    """
    if config.get(key) is None:
        raise CheckpointError(f"the GGUF file does not state '{key}'")
    return config[key]
