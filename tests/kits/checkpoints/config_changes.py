"""Changes of config.json, one field each, and what transformers computes with a changed one.

``transformers_run`` makes a random model of a configuration, stores it, and runs a prompt in three pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Config = dict[str, Any]

# Fields of every configuration that name files, classes or outputs.
_LABELS = frozenset(
    {
        *("_name_or_path", "architectures", "model_type", "transformers_version", "id2label", "label2id"),
        *("dtype", "torch_dtype", "return_dict", "output_hidden_states", "output_attentions", "problem_type"),
        *("_attn_implementation", "use_cache"),
    }
)
_ACTIVATIONS = ("gelu", "relu", "silu", "gelu_pytorch_tanh", "relu2", "tanh")
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_ROPES: tuple[Config, ...] = (
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    _YARN,
    {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False, "beta_fast": 8},
    {**_YARN, "attention_factor": 1.3},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "default", "partial_rotary_factor": 0.5},
)
# Fields of some families, tried in all others.
_FOREIGN: Config = {
    "activation_function": "relu", "attention_bias": True, "attention_multiplier": 0.3,
    "attn_logit_softcapping": 2.0, "clip_qkv": 0.3, "embedding_multiplier": 3.0,
    "final_logit_softcapping": 2.0, "head_dim": 16, "hidden_act": "relu", "hidden_activation": "relu",
    "is_causal": False, "layer_norm_eps": 0.05, "layer_types": ["sliding_attention", "full_attention"],
    "logit_scale": 0.3, "logits_scaling": 3.0, "mlp_bias": True, "no_rope_layers": [0, 1],
    "norm_eps": 0.05, "norm_topk_prob": True, "num_key_value_heads": 1, "parallel_attn": True,
    "partial_rotary_factor": 0.5, "qk_layernorm": True, "query_pre_attn_scalar": 3,
    "residual_multiplier": 0.3,
    "rms_norm_eps": 0.05, "rope_interleave": True, "rope_theta": 5000.0, "routed_scaling_factor": 2.5,
    "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": True, "unknown": 7, "use_bias": True,
    "use_bidirectional_attention": True, "use_parallel_residual": False, "use_qk_norm": True,
}  # fmt: skip


def other_values(value: Any) -> list[Any]:
    """Return values of a field that differ from ``value`` and are of its type."""
    match value:
        case bool():
            return [not value]
        case int():
            return [other for other in (value + 1, value * 2, max(1, value // 2)) if other != value]
        case float():
            return [value * 2 + 0.1, value * 0.5] if value else [0.1]
        case None:
            return [True, 2, 0.5, "gelu"]
        case str():
            return [name for name in _ACTIVATIONS if name != value][:3] if value in _ACTIVATIONS else ["none"]
        case [str(), *_]:
            return [names for names in (value[::-1], value[:1] * len(value)) if names != value]
        case [bool(), *_]:
            return [[not each for each in value]]
        case [int() | float(), *_]:
            return [[2 * each for each in value]]
    return []


def changes(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, Config]]:
    """Yield configurations that differ in one field, each with what was changed.

    Args:
        config: the fields of config.json.
        defaults: all fields of the family with their values, those of ``config`` included.
    """
    for key in sorted(defaults.keys() - _LABELS):
        value = defaults[key]
        if key in config:
            yield f"{key} left out", {name: held for name, held in config.items() if name != key}
        if isinstance(value, dict):
            for name, changed in _changed_parts(key, value):
                yield name, {**config, key: changed}
        else:
            for other in other_values(value):
                yield f"{key}={other}", {**config, key: other}
    for key, value in _FOREIGN.items():
        if key not in defaults:
            yield f"{key}={value}", {**config, key: value}


def _changed_parts(key: str, value: Config) -> Iterator[tuple[str, Config]]:
    for part, held in value.items():
        if isinstance(held, dict):
            for name, changed in _changed_parts(f"{key}.{part}", held):
                yield name, {**value, part: changed}
        else:
            for other in other_values(held):
                yield f"{key}.{part}={other}", {**value, part: other}
    if "rope_theta" in value or "rope_type" in value:
        for rope in _ROPES:
            yield f"{key}={rope}", {**value, **rope}


def tokens() -> list[tuple[Array, Array]]:
    """Return the pieces of two rows, each with its mask; the second row is padded on the left."""
    rng = np.random.default_rng(5)
    pieces = [rng.integers(0, 256, (2, length)) for length in (14, 1, 9)]
    masks = [np.ones_like(piece) for piece in pieces]
    masks[0][1, :5] = 0
    return list(zip(pieces, masks, strict=True))


def transformers_run(config: Mapping[str, Any], folder: Path, *, nudged: bool = False) -> list[Array]:
    """Store a random model with this config.json and return the logits of each of ``tokens``.

    Args:
        config: its content.
        folder: where the model is stored.
        nudged: whether each weight is changed by one unit in the last place, up or down.

    Raises:
        Exception: transformers refuses the configuration, or the model has more than 20 million weights.
    """
    import torch
    import transformers

    made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    alibi = getattr(made, "alibi", False)  # eager attention of Falcon adds it twice
    with torch.device("meta"):
        size = sum(each.numel() for each in transformers.AutoModelForCausalLM.from_config(made).parameters())
    if size > 20_000_000:
        raise ValueError(f"{size} weights")
    model = transformers.AutoModelForCausalLM.from_config(
        made, attn_implementation="sdpa" if alibi else "eager"
    )
    model = model.float().eval()
    _fill(model, str(config["model_type"]))
    if nudged:
        _nudge(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    cache, seen, logits = None, np.zeros((2, 0), np.int64), []
    with torch.inference_mode():
        for piece, mask in tokens():
            seen = np.concatenate([seen, mask], axis=1)
            positions = np.maximum(seen.cumsum(1) - 1, 0)[:, -piece.shape[1] :]
            out = model(
                torch.tensor(piece),
                attention_mask=torch.tensor(seen),
                position_ids=torch.tensor(positions),
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            logits.append(out.logits.numpy())
    return logits


def _nudge(model: Any) -> None:
    import torch

    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            up = torch.randint(0, 2, weight.shape, generator=draw).bool()
            ends = torch.full_like(weight, torch.inf)
            weight.copy_(torch.nextafter(weight, torch.where(up, ends, -ends)))


def _fill(model: Any, model_type: str) -> None:
    """Give every weight random numbers: transformers' own start has norms of 1 and biases of 0."""
    import torch

    random = torch.Generator().manual_seed(1)
    is_gemma = model_type.startswith("gemma")
    less_one = is_gemma and not model_type.startswith("gemma4")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=random) * (
                0.1 if is_gemma and "embed" in name else 0.3
            )
            if weight.ndim == 1 and name.endswith(("weight", "scalar", "scale")) and not less_one:
                values += 1
            weight.copy_(values)
        for name, buffer in model.named_buffers():
            if "e_score" in name or name.endswith("expert_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=random) * 0.3)
    model.tie_weights()
