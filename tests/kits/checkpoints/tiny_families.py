"""Tiny configurations and tensor shapes of families that differ from Llama in their layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]
Config = dict[str, Any]

BASE: Config = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_RMS = {**BASE, "rms_norm_eps": 1e-5}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

FAMILY_CONFIGS: dict[str, Config] = {
    "gemma2": {
        **_RMS,
        "head_dim": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 12,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
    "olmo2": {**_RMS, "hidden_act": "silu", "attention_bias": False},
    "granite": {
        **_RMS,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "starcoder2": {
        **BASE,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "sliding_window": 5,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    "phi": {
        **BASE,
        "num_key_value_heads": 4,
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "rope_parameters": _PARTIAL,
    },
    "gpt_neox": {
        **{key: value for key, value in BASE.items() if key != "num_key_value_heads"},
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "rope_parameters": _PARTIAL,
    },
}

_NORMS = {"olmo2": ("post_attention", "post_feedforward"), "phi": ("input",)}
_GEMMA2_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


def _dense(names: Mapping[str, tuple[int, int]], *, bias: bool) -> Shapes:
    shapes: Shapes = {}
    for name, (outputs, inputs) in names.items():
        shapes[f"{name}.weight"] = (outputs, inputs)
        shapes |= {f"{name}.bias": (outputs,)} if bias else {}
    return shapes


def family_shapes(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a checkpoint's tensors by name."""
    family, n, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or n // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config.get("num_key_value_heads", 0) * head_dim
    biased = family in ("starcoder2", "phi", "gpt_neox")
    out = "self_attn.dense" if family == "phi" else "self_attn.o_proj"
    linears = {
        "self_attn.q_proj": (q, n),
        "self_attn.k_proj": (kv, n),
        "self_attn.v_proj": (kv, n),
        out: (n, q),
    }
    up, down = {
        "starcoder2": ("mlp.c_fc", "mlp.c_proj"),
        "phi": ("mlp.fc1", "mlp.fc2"),
        "gpt_neox": ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    }.get(family, ("mlp.up_proj", "mlp.down_proj"))
    linears |= {up: (inner, n), down: (n, inner)} | ({} if biased else {"mlp.gate_proj": (inner, n)})
    if family == "gpt_neox":
        linears = {name: shape for name, shape in linears.items() if name.startswith("mlp")}
        linears |= {"attention.query_key_value": (3 * q, n), "attention.dense": (n, q)}
    layer = _dense(linears, bias=biased)
    norms = _GEMMA2_NORMS if family == "gemma2" else _NORMS.get(family, ("input", "post_attention"))
    names = [f"{norm}_layernorm" for norm in norms]
    layer |= {
        f"{name}.{kind}": (n,) for name in names for kind in (("weight", "bias") if biased else ("weight",))
    }
    if family == "olmo2":
        layer |= {"self_attn.q_norm.weight": (q,), "self_attn.k_norm.weight": (kv,)}
    prefix, embedding, norm, head = {
        "gpt_neox": ("gpt_neox", "embed_in", "final_layer_norm", "embed_out"),
        "phi": ("model", "embed_tokens", "final_layernorm", "lm_head"),
    }.get(family, ("model", "embed_tokens", "norm", "lm_head"))
    shapes: Shapes = {f"{prefix}.{embedding}.weight": (config["vocab_size"], n)}
    shapes |= {f"{prefix}.{norm}.{kind}": (n,) for kind in (("weight", "bias") if biased else ("weight",))}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"{prefix}.layers.{i}.{name}": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        shapes |= _dense({head: (config["vocab_size"], n)}, bias=family == "phi")
    return shapes
