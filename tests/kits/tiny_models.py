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
from safetensors.numpy import load_file, save_file
from tiny_families import FAMILY_CONFIGS, family_shapes
from tiny_layouts import LAYOUTS
from tiny_relatives import RELATIVES
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

_GEMMA3_TEXT: Config = {
    **_LLAMA,
    "num_hidden_layers": 3,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 12,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "tie_word_embeddings": True,
}

_QWEN2: Config = {**_LLAMA, "head_dim": None, "use_sliding_window": False, "tie_word_embeddings": True}
_QWEN3_MOE: Config = {
    **_LLAMA,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}

# Configurations as transformers 5 writes them, sized to run in milliseconds.
CONFIGS: dict[str, Config] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "sliding_window": 5},
    "qwen2": _QWEN2,
    "qwen3": {**_LLAMA, "head_dim": 16, "tie_word_embeddings": True},
    "smollm3": {**_LLAMA, "head_dim": None, "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1]},
    "phi3": {
        **_LLAMA,
        "head_dim": None,
        "sliding_window": None,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.2],
            "long_factor": [1.5, 3.0],
            "original_max_position_embeddings": 16,
        },
    },
    "mixtral": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "qwen3_moe": _QWEN3_MOE,
    "qwen2_moe": {
        **_LLAMA,
        "head_dim": None,
        "num_hidden_layers": 3,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "gemma3_text": _GEMMA3_TEXT,
    "gemma3": {"text_config": {"model_type": "gemma3_text", **_GEMMA3_TEXT}},
    # Their towers are in tiny_vlms.
    "idefics3": {"text_config": {"model_type": "llama", **_LLAMA}},
    "smolvlm": {"text_config": {"model_type": "llama", **_LLAMA}},
    "llava": {"text_config": {"model_type": "llama", **_LLAMA}},
    "llava_next": {"text_config": {"model_type": "mistral", **_LLAMA, "sliding_window": 5}},
    "llava_next_video": {"text_config": {"model_type": "llama", **_LLAMA}},
    "lighton_ocr": {
        "text_config": {"model_type": "qwen3", **_LLAMA, "head_dim": 16, "tie_word_embeddings": True}
    },
    "internvl": {"text_config": {"model_type": "qwen2", **_QWEN2}},
    "llava_onevision": {"text_config": {"model_type": "qwen2", **_QWEN2}},
    "qwen2_vl": {**_QWEN2, "rope_parameters": {**_LLAMA["rope_parameters"], "mrope_section": [2, 1, 1]}},
    "paddleocr_vl": {**_LLAMA, "rope_parameters": {**_LLAMA["rope_parameters"], "mrope_section": [2, 1, 1]}},
    "qwen2_5_vl": {
        "text_config": {
            **_QWEN2,
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {**_LLAMA["rope_parameters"], "mrope_section": [2, 1, 1]},
        }
    },
    "qwen3_vl": {
        "text_config": {
            **_LLAMA,
            "model_type": "qwen3_vl_text",
            "head_dim": 16,
            "tie_word_embeddings": True,
        }
    },
    "qwen3_vl_moe": {"text_config": {**_QWEN3_MOE, "model_type": "qwen3_vl_moe_text"}},
    **FAMILY_CONFIGS,
    **{model_type: config for model_type, (config, _) in {**LAYOUTS, **RELATIVES}.items()},
    "gpt2": {
        "vocab_size": 260,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
}


def tiny_config(model_type: str, **overrides: Any) -> Config:
    """Return a tiny config.json; an override of None removes the key, "null" writes null."""
    tokens = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config = {"model_type": model_type, **CONFIGS[model_type], **tokens, **overrides}
    return {key: None if value == "null" else value for key, value in config.items() if value is not None}


def write_tiny(
    model_type: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: npt.DTypeLike = ml_dtypes.bfloat16,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of ``model_type`` and return ``folder``."""
    config = tiny_config(model_type, **overrides)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    )
    save_file(random_weights(config, seed, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def write_sharded(model_type: str, folder: Path, **overrides: Any) -> Path:
    """``write_tiny`` with the weights in two files and an index."""
    write_tiny(model_type, folder, **overrides)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{shard}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def random_weights(
    config: Mapping[str, Any], seed: int = 0, dtype: npt.DTypeLike = ml_dtypes.bfloat16
) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a checkpoint with this configuration, with transformers' names."""
    if config["model_type"] == "qwen3_vl_moe":
        text = {**config["text_config"], "model_type": "qwen3_moe"}
        return _stacked_experts(random_weights(text, seed, dtype))
    rng = np.random.default_rng(seed)
    is_gemma = config["model_type"].startswith("gemma")  # it scales the embedding
    less_one = is_gemma and not config["model_type"].startswith("gemma4")  # of the weights of norms
    weights = {}
    for name, shape in _SHAPES[config["model_type"]](config).items():
        values = rng.standard_normal(shape) * (0.1 if is_gemma and "embed" in name else 0.4)
        if len(shape) == 1 and name.endswith(("weight", "scalar", "scale")) and not less_one:
            values += 1
        weights[name] = np.asarray(values.astype(np.float32).astype(dtype))
    return weights


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose first 256 tokens are the bytes, and a chat template."""
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


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return hidden size, feed-forward size, and the total size of queries and of keys."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    return hidden, config["intermediate_size"], heads * head_dim, config["num_key_value_heads"] * head_dim


def _layered(config: Mapping[str, Any], layer: Shapes, prefix: str = "model") -> Shapes:
    """Return the shapes of a decoder in which every layer has the shapes ``layer``."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {f"{prefix}.embed_tokens.weight": (vocab, hidden), f"{prefix}.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"{prefix}.layers.{i}.{name}": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _llama_layer(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, q_size, kv_size = _sizes(config)
    qkv_bias = config.get("attention_bias", config["model_type"] in ("qwen2", "qwen2_moe"))
    linears = {
        "self_attn.q_proj": (q_size, hidden, qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.get("attention_bias")),
        "mlp.gate_proj": (inner, hidden, config.get("mlp_bias")),
        "mlp.up_proj": (inner, hidden, config.get("mlp_bias")),
        "mlp.down_proj": (hidden, inner, config.get("mlp_bias")),
    }
    shapes: Shapes = {f"{name}.weight": (out, into) for name, (out, into, _) in linears.items()}
    shapes |= {f"{name}.bias": (out,) for name, (out, _, bias) in linears.items() if bias}
    return shapes | {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def _head_norms(config: Mapping[str, Any]) -> Shapes:
    return {f"self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"}


def _llama_shapes(config: Mapping[str, Any]) -> Shapes:
    return _layered(config, _llama_layer(config))


def _qwen3_shapes(config: Mapping[str, Any]) -> Shapes:
    return _layered(config, _llama_layer(config) | _head_norms(config))


def _mixtral_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, *_ = _sizes(config)
    layer = {name: shape for name, shape in _llama_layer(config).items() if not name.startswith("mlp")}
    layer["block_sparse_moe.gate.weight"] = (config["num_local_experts"], hidden)
    for expert in range(config["num_local_experts"]):
        shapes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
        layer |= {f"block_sparse_moe.experts.{expert}.{k}.weight": shape for k, shape in shapes.items()}
    return _layered(config, layer)


def _with_experts(config: Mapping[str, Any], shapes: Shapes) -> Shapes:
    """Return the shapes with experts and a router instead of the feed-forward layer in MoE layers."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    for layer in set(range(config["num_hidden_layers"])) - set(config["mlp_only_layers"]):
        prefix = f"model.layers.{layer}.mlp"
        for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            del shapes[f"{prefix}.{name}_proj.weight"]
            for expert in range(config["num_experts"]):
                shapes[f"{prefix}.experts.{expert}.{name}_proj.weight"] = shape
        shapes[f"{prefix}.gate.weight"] = (config["num_experts"], hidden)
    return shapes


def _stacked_experts(weights: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a Qwen 3 MoE as Qwen3-VL stores them: stacks of experts, [experts, in, out]."""
    found: dict[str, npt.NDArray[Any]] = {}
    stacks: dict[str, list[npt.NDArray[Any]]] = {}
    for name, array in weights.items():
        name = name.replace("model.", "model.language_model.")
        layer, inside, expert = name.partition(".mlp.experts.")
        if inside:
            stacks.setdefault(f"{layer}{inside}{expert.split('.')[1]}", []).append(array.T)
        else:
            found[name] = array
    for name, gates in list(stacks.items()):
        if name.endswith("gate_proj"):
            ups = stacks[name.replace("gate_proj", "up_proj")]
            both = [np.concatenate(pair, axis=1) for pair in zip(gates, ups, strict=True)]
            found[name.replace("gate_proj", "gate_up_proj")] = np.ascontiguousarray(both)
        elif name.endswith("down_proj"):
            found[name] = np.ascontiguousarray(gates)
    return found


def _qwen2_moe_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["shared_expert_intermediate_size"]
    shapes = _with_experts(config, _llama_shapes(config))
    for router in [name for name in shapes if name.endswith("mlp.gate.weight")]:
        prefix = router.removesuffix("gate.weight")
        for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            shapes[f"{prefix}shared_expert.{name}_proj.weight"] = shape
        shapes[f"{prefix}shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _gemma3_shapes(config: Mapping[str, Any], prefix: str = "model") -> Shapes:
    norms: Shapes = {
        f"{place}_feedforward_layernorm.weight": (config["hidden_size"],) for place in ("pre", "post")
    }
    return _layered(config, _llama_layer(config) | _head_norms(config) | norms, prefix)


def _idefics3_shapes(config: Mapping[str, Any]) -> Shapes:
    text = config["text_config"]
    shapes = _layered(text, _llama_layer(text), "model.text_model")
    return {
        **shapes,
        "model.vision_model.post_layernorm.weight": (8,),
        "model.connector.modality_projection.proj.weight": (32, 8),
    }


def _llava_shapes(config: Mapping[str, Any]) -> Shapes:
    text = config["text_config"]
    shapes = _layered(text, _llama_layer(text), "language_model.model")
    return {name.replace("lm_head", "language_model.lm_head"): shape for name, shape in shapes.items()}


def _gemma3_seeing_shapes(config: Mapping[str, Any]) -> Shapes:
    return {
        **_gemma3_shapes(config["text_config"], "language_model.model"),
        "vision_tower.vision_model.post_layernorm.weight": (8,),
    }


def _phi3_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, q_size, kv_size = _sizes(config)
    fused: Shapes = {
        "self_attn.qkv_proj.weight": (q_size + 2 * kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_up_proj.weight": (2 * inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    return _layered(config, fused)


def _gpt2_shapes(config: Mapping[str, Any]) -> Shapes:
    n = config["n_embd"]
    shapes: Shapes = {"transformer.wte.weight": (config["vocab_size"], n)}
    shapes["transformer.wpe.weight"] = (config["n_positions"], n)
    linears = {
        "attn.c_attn": (n, 3 * n),
        "attn.c_proj": (n, n),
        "mlp.c_fc": (n, 4 * n),
        "mlp.c_proj": (4 * n, n),
    }
    norms = [f"transformer.h.{i}.ln_{k}" for i in range(config["n_layer"]) for k in (1, 2)]
    for norm in [*norms, "transformer.ln_f"]:
        shapes |= {f"{norm}.weight": (n,), f"{norm}.bias": (n,)}
    for i in range(config["n_layer"]):
        for name, shape in linears.items():
            shapes |= {f"transformer.h.{i}.{name}.weight": shape, f"transformer.h.{i}.{name}.bias": shape[1:]}
    return shapes


_SHAPES: dict[str, Callable[[Mapping[str, Any]], Shapes]] = {
    **dict.fromkeys(FAMILY_CONFIGS, family_shapes),
    **{model_type: shapes for model_type, (_, shapes) in {**LAYOUTS, **RELATIVES}.items()},
    "llama": _llama_shapes,
    "paddleocr_vl": _llama_shapes,
    "mistral": _llama_shapes,
    "qwen2": _llama_shapes,
    "qwen3": _qwen3_shapes,
    "smollm3": _llama_shapes,
    "mixtral": _mixtral_shapes,
    "qwen3_moe": lambda config: _with_experts(config, _qwen3_shapes(config)),
    "qwen2_moe": _qwen2_moe_shapes,
    "phi3": _phi3_shapes,
    "gemma3_text": _gemma3_shapes,
    "gemma3": _gemma3_seeing_shapes,
    "idefics3": _idefics3_shapes,
    **dict.fromkeys(
        ("llava", "llava_next", "llava_next_video", "llava_onevision", "internvl"), _llava_shapes
    ),
    "qwen2_vl": lambda config: _llama_shapes({**config, "model_type": "qwen2"}),
    "qwen2_5_vl": lambda config: _layered(
        config["text_config"],
        _llama_layer({**config["text_config"], "model_type": "qwen2"}),
        "model.language_model",
    ),
    "lighton_ocr": lambda config: _layered(
        config["text_config"],
        _llama_layer(config["text_config"]) | _head_norms(config["text_config"]),
        "model.language_model",
    ),
    "qwen3_vl": lambda config: _layered(
        config["text_config"],
        _llama_layer(config["text_config"]) | _head_norms(config["text_config"]),
        "model.language_model",
    ),
    "smolvlm": _idefics3_shapes,
    "gpt2": _gpt2_shapes,
}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
