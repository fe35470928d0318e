"""Tiny random checkpoints of every family, as Hugging Face folders, from a seed and without torch.

    write_tiny("llama", folder)                                     # config.json, model.safetensors, tokenizer
    write_tiny("qwen2", folder, tie_word_embeddings=True, seed=3)   # keywords override config.json
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, PAD = 256, 257, 258
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

_LLAMA: Config = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

CONFIGS: dict[str, Config] = {
    "llama": _LLAMA,
}


def tiny_config(model_type: str, **overrides: Any) -> Config:
    """config.json of a tiny ``model_type``; an override of None removes the key."""
    tokens = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config = {"model_type": model_type, **CONFIGS[model_type], **tokens, **overrides}
    return {key: value for key, value in config.items() if value is not None}


def write_tiny(
    model_type: str, folder: Path, *, seed: int = 0, dtype: npt.DTypeLike = ml_dtypes.bfloat16, **overrides: Any
) -> Path:
    """Write a random checkpoint of ``model_type`` and return ``folder``."""
    config = tiny_config(model_type, **overrides)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD})
    save_file(random_weights(config, seed, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def random_weights(
    config: Mapping[str, Any], seed: int = 0, dtype: npt.DTypeLike = ml_dtypes.bfloat16
) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a checkpoint with this configuration, under the names transformers gives them."""
    rng = np.random.default_rng(seed)
    centre = 0.0 if config["model_type"].startswith("gemma3") else 1.0  # Gemma stores norms less one
    weights = {}
    for name, shape in _SHAPES[config["model_type"]](config).items():
        values = rng.standard_normal(shape) * 0.2
        is_norm = name.endswith("weight") and len(shape) == 1
        weights[name] = (values + centre if is_norm else values).astype(np.float32).astype(dtype)
    return weights


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose first 256 tokens are the bytes, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<pad>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _llama_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, config.get("attention_bias")),
        "self_attn.k_proj": (kv_size, hidden, config.get("attention_bias")),
        "self_attn.v_proj": (kv_size, hidden, config.get("attention_bias")),
        "self_attn.o_proj": (hidden, q_size, config.get("attention_bias")),
        "mlp.gate_proj": (inner, hidden, config.get("mlp_bias")),
        "mlp.up_proj": (inner, hidden, config.get("mlp_bias")),
        "mlp.down_proj": (hidden, inner, config.get("mlp_bias")),
    }
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


_SHAPES: dict[str, Callable[[Mapping[str, Any]], Shapes]] = {"llama": _llama_shapes}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
