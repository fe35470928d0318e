"""The keys of a GGUF file's metadata: those that the readers read, and those that must have no effect.

A key of the architecture or of the tokenizer that is neither is refused by name: it may change the results.
Keys: gguf-py/gguf/constants.py of https://github.com/ggml-org/llama.cpp; effects: src/llama-model.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError

Metadata = Mapping[str, Any]
# Keys of the architecture, without its prefix, that are read beside those that ``config_of`` renames.
READ = frozenset(
    {
        *("attention.value_length", "rope.dimension_count", "rope.scale_linear", "rope.scaling.type"),
        *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
        *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    }
)
READ_OF_TOKENIZER = frozenset(
    {
        *("ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.merges", "ggml.scores"),
        *("ggml.bos_token_id", "ggml.eos_token_id", "ggml.unknown_token_id", "ggml.padding_token_id"),
        *("ggml.eot_token_id", "ggml.eom_token_id", "ggml.add_bos_token", "ggml.add_space_prefix"),
        *("ggml.add_eos_token", "chat_template"),
    }
)
_OF_TOKENIZER: Mapping[str, tuple[type, str]] = {
    "chat_template": (str, "text"),
    **{f"ggml.add_{name}": (bool, "flag") for name in ("bos_token", "eos_token", "space_prefix")},
}
# Facts of other uses: infilling, other templates, kinds of tokenizers that are refused.
_NO_EFFECT_OF_TOKENIZER = re.compile(
    r"ggml\.(fim_\w+|prefix_token_id|suffix_token_id|middle_token_id|mask_token_id|cls_token_id|add_sep_token"
    r"|seperator_token_id|separator_token_id|token_type_count|remove_extra_whitespaces|precompiled_charsmap)"
    r"|huggingface\.json|rwkv\.world|chat_templates|chat_template\..+"
)
_NO_EFFECT = frozenset(
    {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_epsilon"}
    | {"pooling_type", "expert_used_count"}
)
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}  # every such layer sees the whole context

Test = Callable[[Any, Metadata, str], bool]


def _one_of(*neutral: Any) -> Test:
    def test(value: Any, metadata: Metadata, prefix: str) -> bool:
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        return all(number in neutral for number in values)

    return test


def _equals(other: str) -> Test:
    return lambda value, metadata, prefix: bool(value == metadata.get(f"{prefix}.{other}"))


def _is_usual_scale(value: Any, metadata: Metadata, prefix: str) -> bool:
    size = metadata.get(f"{prefix}.attention.key_length")
    if not isinstance(size, int) or not isinstance(value, float | int):
        return bool(value == 0)
    return bool(value == 0) or abs(value * size**0.5 - 1) < 1e-5


def _is_usual_pattern(value: Any, metadata: Metadata, prefix: str) -> bool:
    period = _PATTERNS.get(prefix)
    if period is None or not isinstance(value, list):
        return bool(value == period)
    layers = range(metadata.get(f"{prefix}.block_count", 0))
    return list(value) == [(layer + 1) % period != 0 for layer in layers]


def _is_usual_extension(value: Any, metadata: Metadata, prefix: str) -> bool:
    yarn = metadata.get(f"{prefix}.rope.scaling.type") == "yarn"
    return isinstance(value, int | float) and (value < 0 or value == (1.0 if yarn else 0.0))


# The values with which a key has no effect on the architectures that are supported.
_NEUTRAL: Mapping[str, Test] = {
    "attention.causal": _one_of(True),
    "attention.clamp_kqv": _one_of(0),
    "attention.key_length_swa": _equals("attention.key_length"),
    "attention.max_alibi_bias": _one_of(0),
    "attention.output_scale": _one_of(0, 1),
    "attention.scale": _is_usual_scale,
    "attention.shared_kv_layers": _one_of(0),
    "attention.sliding_window_pattern": _is_usual_pattern,
    "attention.temperature_length": _one_of(0),
    "attention.temperature_scale": _one_of(0),
    "attention.value_length_swa": _equals("attention.value_length"),
    "embedding_length_out": _equals("embedding_length"),
    "embedding_length_per_layer_input": _one_of(0),
    "embedding_scale": _one_of(0, 1),
    "expert_gating_func": _one_of(0, 1, 3),  # the softmax that the architectures have anyway
    "expert_group_count": _one_of(0, 1),
    "expert_group_used_count": _one_of(0, 1),
    "expert_shared_count": _one_of(0),
    "expert_shared_feed_forward_length": _one_of(0),
    "expert_weights_norm": _one_of(True),
    "expert_weights_scale": _one_of(0, 1),
    "full_attention_interval": _one_of(0, 1),
    "leading_dense_block_count": _one_of(0),
    "logit_scale": _one_of(0, 1),
    "nextn_predict_layers": _one_of(0),
    "residual_scale": _one_of(0, 1),
    "rope.dimension_count_swa": _equals("rope.dimension_count"),
    "rope.dimension_sections": _one_of(0),
    "rope.freq_base_swa": _equals("rope.freq_base"),
    "rope.scaling.alpha": _one_of(0),
    "rope.scaling.yarn_ext_factor": _is_usual_extension,
    "rope.scaling.yarn_log_multiplier": _one_of(0),
    "router_logit_softcapping": _one_of(0),
    "swin_norm": _one_of(False),
    "use_parallel_residual": _one_of(False),
}


# Keys whose values are not numbers; those of _LISTS may be a list, with a value for each layer.
_TEXTS = ("rope.scaling.type", "tensor_data_layout")
_LISTS = (
    *("attention.head_count", "attention.head_count_kv", "feed_forward_length"),
    *("expert_used_count", "expert_feed_forward_length"),
)
# One for each layer.
_FLAGS = ("attention.recurrent_layers", "attention.rope_pattern", "attention.sliding_window_pattern")
_SWITCHES = ("expert_weights_norm", "kda.safe_gate", "use_parallel_residual")
_SECTIONS = ("rope.dimension_sections",)

_COUNTS = re.compile(r".*(count|count_kv|length|window|rank|size|kernel|cache|interval|nextn_predict_layers)")


def check_types(metadata: Metadata, prefix: str, read: Collection[str]) -> None:
    """Check that values of an architecture's keys that are read have the right type.

    They are numbers, counts are integers, and some are texts or lists. Of the tokenizer's, its flags and its
    template are checked.

    Args:
        metadata: metadata of the file.
        prefix: the architecture, with which its keys begin.
        read: keys that the architecture reads beside those of all, without the prefix.

    Raises:
        CheckpointError: one is not.
    """
    for key, value in metadata.items():
        family, _, name = key.partition(".")
        if family == "tokenizer" and name in _OF_TOKENIZER and not isinstance(value, _OF_TOKENIZER[name][0]):
            raise CheckpointError(f"the GGUF file's '{key}' is {_shown(value)}, no {_OF_TOKENIZER[name][1]}")
        if family != prefix or (name in _NEUTRAL and name not in read) or name in _NO_EFFECT:
            continue
        whole = _COUNTS.fullmatch(name) is not None
        values = value if isinstance(value, list) and name in _LISTS else [value]
        if name in _TEXTS:
            fits, kind = isinstance(value, str), "text"
        elif name in _SWITCHES:
            fits, kind = isinstance(value, bool), "flag"
        elif name in _FLAGS or name in _SECTIONS:
            fits = isinstance(value, list) and all(isinstance(each, int) for each in value)
            kind = "list of flags" if name in _FLAGS else "list of integers"
        else:
            kinds, kind = (int, "integer") if whole else (int | float, "number")
            fits = all(isinstance(each, kinds) and not isinstance(each, bool) for each in values)
        if not fits:
            raise CheckpointError(f"the GGUF file's '{key}' is {_shown(value)}, no {kind}")


def check_keys(metadata: Metadata, prefix: str, read: frozenset[str]) -> None:
    """Refuse metadata that would change the results and is not read.

    Args:
        metadata: metadata of the file.
        prefix: the architecture, with which its keys begin.
        read: keys of the architecture that the readers read, without the prefix.

    Raises:
        UnsupportedModelError: a key is unknown, or its value has an effect.
    """
    for key, value in metadata.items():
        family, _, name = key.partition(".")
        if family == prefix:
            test = _NEUTRAL.get(name)
            known = name in read or name in READ or name in _NO_EFFECT
            known = known or (test is not None and test(value, metadata, prefix))
        elif family == "tokenizer":
            known = name in READ_OF_TOKENIZER or _NO_EFFECT_OF_TOKENIZER.fullmatch(name) is not None
        else:
            known = True  # general facts, shards, and other architectures
        if not known:
            raise UnsupportedModelError(
                f"the GGUF file has {key} = {_shown(value)}, which is not supported and may change the "
                "results; take the model's safetensors checkpoint"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
