"""What one architecture of GGUF files has other than the rest: names, keys and forms of tensors.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError, UnsupportedModelError
from ...records import dataclass
from ...storage.stored_tensor import Array, StoredTensor
from . import architectures as modules
from .keys import check_types

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
NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # of architectures with norms behind attention and the feed-forward layer
_EXPERT = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_BARE = ("self_attn.sinks",)  # parameters whose names have no suffix
TOWER = "clip"  # the architecture that llama.cpp writes for every vision tower


Tensors = Mapping[str, StoredTensor]
Shape = tuple[int, ...]


def in_channels(shape: Shape) -> Shape:
    """Return the shape of a convolution, whose stored [channels, taps] is [channels, 1, taps]."""
    return (shape[0], 1, shape[1]) if len(shape) == 2 else shape


def flat(shape: Shape) -> Shape:
    """Return the shape of a tensor that is stored with axes of size 1, or by groups."""
    return (math.prod(shape),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The differences of one GGUF architecture from the common names.

    Args:
        model_type: the model family, a module of ``exporter/models``.
        inner: names of a layer's modules that differ from the common ones.
        outer: the same of modules outside of layers.
        parameters: names of a layer's parameters that are not a module's weight or bias.
        views: by the end of a name of Hugging Face, the function that makes its tensor of the stored one.
        shapes: by the end of a name, the function that makes its shape of the stored one.
        plain_norms: ends of names of norms without ``norm_offset``.
        rotates_pairs: whether rows of q and k are ordered for a rope that rotates adjacent elements.
        norm_offset: offset that the file's norm weights include.
        experts: the scope of a layer's experts, whose weights are stacked; empty without experts.
        expert_names: the names of an expert's modules, by those of the stacks.
        rows: by the end of a stored name, the function that returns the rows of each tensor in it.
        joined: by the end of a name, how it is made of several stored tensors.
        numbers: keys of metadata, with their prefix, that are lists of a number for each layer; the name of
            the layer's parameter, and its shape of one element.
        constants: ends of names of vectors whose numbers are equal, in all layers, and the key of config.json
            that holds the number.
        own_factors: whether ``adapt`` reads the factors of the rope by frequency, ``rope_factors``.
        own_heads: whether ``adapt`` reads the sizes of heads, which may be others for keys and for values.
        keys: further metadata, without the prefix, and the keys of config.json.
        adapt: returns keys of config.json that are computed from others and from tensors.
    """

    model_type: str
    inner: Mapping[str, str] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    views: Mapping[str, Callable[[Array], Array]] = field(default_factory=dict)
    shapes: Mapping[str, Callable[[Shape], Shape]] = field(default_factory=dict)
    plain_norms: tuple[str, ...] = ()
    rotates_pairs: bool = False
    norm_offset: float = 0.0
    experts: str = ""
    expert_names: Mapping[str, str] = field(default_factory=lambda: dict(_EXPERT))
    rows: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, npt.NDArray[np.intp]]]] = field(
        default_factory=dict
    )
    joined: Mapping[str, Join] = field(default_factory=dict)
    numbers: Mapping[str, tuple[str, Shape]] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)
    own_factors: bool = False
    own_heads: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    adapt: Callable[[Mapping[str, Any], Tensors], dict[str, Any]] = lambda config, tensors: {}


@dataclass(frozen=True, slots=True)
class Join:
    """A tensor that files store as several.

    Args:
        parts: ends of Hugging Face's names of the parts.
        shape: returns its shape from those of the parts.
        make: returns it from the arrays of the parts.
    """

    parts: tuple[str, ...]
    shape: Callable[..., Shape]
    make: Callable[..., Array]


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


def has(tensors: Tensors, end: str) -> bool:
    """Whether the name of a tensor has this end."""
    return any(name.endswith(end) for name in tensors)


def by_window(flags: Any, count: int) -> list[str]:
    """Return the kinds of layers, of which flags tell whether they have a window.

    Raises:
        CheckpointError: there are no flags of all layers.
    """
    if not isinstance(flags, list) or len(flags) < count:
        raise CheckpointError(f"the GGUF file needs a flag for each of {count} layers: which have a window")
    return ["sliding_attention" if flag else "full_attention" for flag in flags[:count]]


class _Module(Protocol):
    NAME: str
    ARCHITECTURE: Architecture


def architectures() -> dict[str, Architecture]:
    """Return all architectures by name, sorted."""
    every = [_module(each.name) for each in pkgutil.iter_modules(modules.__path__)]
    return {module.NAME: module.ARCHITECTURE for module in sorted(every, key=lambda module: module.NAME)}


def architecture(metadata: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a file.

    Raises:
        CheckpointError: the metadata has no architecture, or a key of it has the wrong type.
        UnsupportedModelError: the architecture is not supported.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError("the GGUF file has no 'general.architecture'")
    if name == TOWER:
        raise UnsupportedModelError(
            "this GGUF file (mmproj) holds the vision tower of a model alone; give the file of its decoder, "
            "beside which it lies"
        )
    place = name.replace("-", "_")
    known = any(each.name == place for each in pkgutil.iter_modules(modules.__path__))
    if not known or name != (module := _module(place)).NAME:
        raise UnsupportedModelError(
            f"GGUF files of the architecture '{name}' are not supported; these are: "
            f"{', '.join(architectures())}. Use the model's safetensors checkpoint"
        )
    if metadata.get(f"{name}.expert_count") and not module.ARCHITECTURE.experts:
        raise UnsupportedModelError(
            f"GGUF files of the architecture '{name}' with a mixture of experts are not supported; "
            "take the model's safetensors checkpoint"
        )
    check_types(metadata, name, module.ARCHITECTURE.keys)
    return module.ARCHITECTURE


def _module(place: str) -> _Module:
    return cast(_Module, importlib.import_module(f"{modules.__name__}.{place}"))
