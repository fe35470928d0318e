"""Tiny configurations of families that are close to others, each with a function of its tensors' shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tiny_families import BASE, Config, Shapes
from tiny_layouts import LATENT, attention, decoder, experts, gated_mlp, latent_decoder, modules, norms

Layout = tuple[Config, Callable[[Mapping[str, Any]], Shapes]]

_HEADS: Config = {**BASE, "head_dim": 16, "rms_norm_eps": 1e-5, "attention_bias": False}
_BY_TYPE: Config = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def _llama(config: Mapping[str, Any]) -> Shapes:
    bias = bool(config.get("attention_bias"))
    layer = attention(config, bias) | gated_mlp(config) | norms(config, "input", "post_attention")
    if config.get("attention_out_bias"):
        layer["self_attn.o_proj.bias"] = (config["hidden_size"],)
    return decoder(config, lambda _: layer)


def _olmo(config: Mapping[str, Any]) -> Shapes:
    layer = attention(config) | gated_mlp(config) | norms(config, "post_attention", "post_feedforward")
    return decoder(config, lambda _: layer | _whole_norms(layer))


def _whole_norms(layer: Shapes) -> Shapes:
    """Return the shapes of norms over all heads of queries and of keys."""
    q, k = (layer[f"self_attn.{name}_proj.weight"][0] for name in "qk")
    return modules(self_attn__q_norm=(q,), self_attn__k_norm=(k,))


def _head_norms(config: Mapping[str, Any]) -> Shapes:
    size = (config["head_dim"],)
    return modules(self_attn__q_norm=size, self_attn__k_norm=size)


def _plain_mlp(config: Mapping[str, Any], up: str, down: str, *, bias: bool = False) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return modules(bias, **{f"mlp__{up}": (inner, hidden), f"mlp__{down}": (hidden, inner)})


def _arcee(config: Mapping[str, Any]) -> Shapes:
    layer = attention(config) | norms(config, "input", "post_attention")
    layer |= _plain_mlp(config, "up_proj", "down_proj", bias=config["mlp_bias"])
    return decoder(config, lambda _: layer)


def _hunyuan(config: Mapping[str, Any]) -> Shapes:
    size = (config["head_dim"],)
    layer = attention(config, config["attention_bias"]) | gated_mlp(config)
    layer |= norms(config, "input", "post_attention")
    layer |= modules(self_attn__query_layernorm=size, self_attn__key_layernorm=size)
    return decoder(config, lambda _: layer)


def _apertus(config: Mapping[str, Any]) -> Shapes:
    layer = attention(config) | _head_norms(config) | norms(config, "attention", "feedforward")
    layer |= _plain_mlp(config, "up_proj", "down_proj")
    layer |= {"mlp.act_fn.alpha_p": (1,), "mlp.act_fn.alpha_n": (1,)}
    layer |= {"mlp.act_fn.beta": (), "mlp.act_fn.eps": ()}
    return decoder(config, lambda _: layer)


def _nanochat(config: Mapping[str, Any]) -> Shapes:
    layer = attention(config) | _plain_mlp(config, "fc1", "fc2")
    shapes = decoder(config, lambda _: layer)
    del shapes["model.norm.weight"]
    return shapes


def _glm4_moe(config: Mapping[str, Any]) -> Shapes:
    sparse = experts(config) | {"mlp.gate.e_score_correction_bias": (config["n_routed_experts"],)}
    base = attention(config, config["attention_bias"]) | norms(config, "input", "post_attention")
    base |= _head_norms(config) if config["use_qk_norm"] else {}
    dense = config["first_k_dense_replace"]
    return decoder(config, lambda i: base | (gated_mlp(config) if i < dense else sparse))


def _ernie_moe(config: Mapping[str, Any]) -> Shapes:
    count, bias = config["moe_num_experts"], config["use_bias"]
    sizes = {"n_routed_experts": count, "n_shared_experts": config["moe_num_shared_experts"]}
    sparse = experts({**config, **sizes}) | {"mlp.moe_statics.e_score_correction_bias": (1, count)}
    base = attention(config, bias) | norms(config, "input", "post_attention")
    first = config["moe_layer_start_index"]
    return decoder(config, lambda i: base | (gated_mlp(config, bias) if i < first else sparse))


def _routed(config: Mapping[str, Any], width: int) -> Shapes:
    hidden, count = config["hidden_size"], config["num_experts"]
    shapes = modules(mlp__gate=(count, hidden))
    for i in range(count):
        for name, shape in {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}.items():
            shapes |= modules(**{f"mlp__experts__{i}__{name}_proj": shape})
    return shapes


def _olmoe(config: Mapping[str, Any]) -> Shapes:
    layer = attention(config) | norms(config, "input", "post_attention")
    layer |= _whole_norms(layer) | _routed(config, config["intermediate_size"])
    return decoder(config, lambda _: layer)


def _mellum(config: Mapping[str, Any]) -> Shapes:
    base = attention(config) | _head_norms(config) | norms(config, "input", "post_attention")
    sparse, kinds = _routed(config, config["moe_intermediate_size"]), config["mlp_layer_types"]
    return decoder(config, lambda i: base | (sparse if kinds[i] == "sparse" else gated_mlp(config)))


def _granite_swa(config: Mapping[str, Any]) -> Shapes:
    layer = attention(config) | gated_mlp(config) | norms(config, "input", "post_attention")
    layer["self_attn.sinks"] = (config["num_attention_heads"],)
    return decoder(config, lambda _: layer)


def _lfm3(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, taps = config["hidden_size"], config["intermediate_size"], config["conv_L_cache"]

    def layer(i: int) -> Shapes:
        shapes = modules(operator_norm=(hidden,), ffn_norm=(hidden,), feed_forward__w2=(hidden, inner))
        shapes |= modules(feed_forward__w1=(inner, hidden), feed_forward__w3=(inner, hidden))
        if config["use_sandwich_norm"]:
            shapes |= modules(post_operator_norm=(hidden,), post_ffn_norm=(hidden,))
        if config["layer_types"][i] != "conv":
            shapes |= attention(config) | _head_norms(config)
            gate = modules(self_attn__gate_proj=(config["num_attention_heads"], hidden))
            return shapes | (gate if config["use_attention_gate"] else {})
        shapes |= modules(conv__in_proj=(3 * hidden, hidden), conv__out_proj=(hidden, hidden))
        return shapes | {"conv.conv.weight": (hidden, 1, taps)}

    return decoder(config, layer, norm="embedding_norm")


def _bitnet(config: Mapping[str, Any]) -> Shapes:
    layer = attention(config) | gated_mlp(config) | norms(config, "input", "post_attention")
    layer |= modules(self_attn__attn_sub_norm=(config["hidden_size"],))
    return decoder(config, lambda _: layer | modules(mlp__ffn_sub_norm=(config["intermediate_size"],)))


def _phimoe(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    bias = config["attention_bias"]
    layer = attention(config, bias) | norms(config, "input", "post_attention", bias=True)
    if bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    layer |= modules(block_sparse_moe__gate=(count, hidden))
    for expert in range(count):
        scope = f"block_sparse_moe__experts__{expert}__"
        layer |= modules(**{f"{scope}w1": (inner, hidden), f"{scope}w3": (inner, hidden)})
        layer |= modules(**{f"{scope}w2": (hidden, inner)})
    shapes = decoder(config, lambda _: layer, norm_bias=True)
    return shapes | ({"lm_head.bias": (config["vocab_size"],)} if config["lm_head_bias"] else {})


def _muse_glimmer(config: Mapping[str, Any]) -> Shapes:
    return _muse_text(config["text_config"], "model.language_model.")


def _muse_text(text: Mapping[str, Any], prefix: str = "model.") -> Shapes:
    layer = attention(text) | gated_mlp(text)
    layer |= norms(text, "input", "post_attention", "pre_feedforward", "post_feedforward")
    width = text["num_attention_heads"] * text["head_dim"]
    layer |= modules(self_attn__gate_proj=(width, text["hidden_size"]))
    return decoder(text, lambda _: layer, prefix=prefix)


def _kimi_delta(config: Mapping[str, Any], heads: int, size: int, taps: int) -> Shapes:
    hidden, width = config["hidden_size"], heads * size
    shapes = modules(**{f"{part}_proj": (width, hidden) for part in "qkv"})
    shapes |= modules(**{f"{part}_conv1d": (width, 1, taps) for part in "qkv"})
    shapes |= modules(b_proj=(heads, hidden), o_norm=(size,), o_proj=(hidden, width))
    return shapes | {"dt_bias": (width,)}


def _kimi_linear(config: Mapping[str, Any]) -> Shapes:
    hidden, linear = config["hidden_size"], config["linear_attn_config"]
    heads, size, taps = (linear[key] for key in ("num_heads", "head_dim", "short_conv_kernel_size"))
    delta = _kimi_delta(config, heads, size, taps) | {"A_log": (1, 1, heads, 1)}
    for name in "fg":
        delta |= modules(**{f"{name}_a_proj": (size, hidden), f"{name}_b_proj": (heads * size, size)})
    count, width = config["num_experts"], config["moe_intermediate_size"]
    sparse = modules(gate=(count, hidden)) | {"gate.e_score_correction_bias": (count,)}
    for i in range(count):
        sparse |= modules(**{f"experts__{i}__{name}": (width, hidden) for name in ("w1", "w3")})
        sparse |= modules(**{f"experts__{i}__w2": (hidden, width)})
    inner = width * config["num_shared_experts"]
    for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
        sparse |= modules(**{f"shared_experts__{name}_proj": shape})

    def layer(i: int) -> Shapes:
        shapes = norms(config, "input", "post_attention")
        if i + 1 in linear["full_attn_layers"]:
            shapes |= {name: shape for name, shape in _latent(config).items() if "self_attn" in name}
        else:
            shapes |= {f"self_attn.{name}": shape for name, shape in delta.items()}
        if i < config["first_k_dense_replace"]:
            return shapes | gated_mlp(config)
        return shapes | {f"block_sparse_moe.{name}": shape for name, shape in sparse.items()}

    return decoder(config, layer)


def _latent(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a layer with latent attention, and a dense feed-forward layer."""
    dense = {**config, "num_hidden_layers": 1, "first_k_dense_replace": 1, "model_type": ""}
    first = "model.layers.0."
    return {
        name.removeprefix(first): shape
        for name, shape in latent_decoder(dense).items()
        if name.startswith(first)
    }


def _bailing_hybrid(config: Mapping[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size, taps = config["head_dim"], config["short_conv_kernel_size"]
    delta = _kimi_delta(config, heads, size, taps) | {"A_log": (heads,)}
    delta |= modules(f_proj=(heads * size, hidden), g_proj=(heads * size, hidden))
    sizes = {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    sparse = experts({**config, **sizes}) | {"mlp.gate.expert_bias": (config["num_experts"],)}
    gate = {"self_attn.g_proj.weight": (heads, hidden)}

    def layer(i: int) -> Shapes:
        shapes = norms(config, "input", "post_attention")
        if (i + 1) % config["layer_group_size"] == 0:
            parts = {**_latent(config), **gate}
            parts = {name.replace("o_proj", "dense"): shape for name, shape in parts.items()}
            own = {name: shape for name, shape in parts.items() if "self_attn" in name}
        else:
            own = {f"self_attn.{name}": shape for name, shape in delta.items()}
        shapes |= {name.replace("self_attn", "attention"): shape for name, shape in own.items()}
        return shapes | (gated_mlp(config) if i < config["first_k_dense_replace"] else sparse)

    return decoder(config, layer, embedding="word_embeddings")


def _mistral3(config: Mapping[str, Any]) -> Shapes:
    text = {**config["text_config"], "tie_word_embeddings": config["tie_word_embeddings"]}
    shapes = {f"language_model.{name}": shape for name, shape in _llama(text).items()}
    return {**shapes, "vision_tower.norm.weight": (8,)}


_MINISTRAL3: Config = {
    **_HEADS,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}

_MUSE: Config = {
    **_HEADS,
    "num_hidden_layers": 5,
    "hidden_activation": "silu",
    "sliding_window": 5,
    "final_logit_softcapping": 3.0,
    "qk_scale_factor": 2.0,
    "output_multiplier": 0.5,
    "post_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

RELATIVES: dict[str, Layout] = {
    "gemma": ({**_HEADS, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}, _llama),
    "olmo3": ({**BASE, "rms_norm_eps": 1e-5, "attention_bias": False, **_BY_TYPE}, _olmo),
    "seed_oss": ({**_HEADS, "attention_bias": True, "attention_out_bias": True, "mlp_bias": False}, _llama),
    "arcee": ({**_HEADS, "hidden_act": "relu2", "mlp_bias": True}, _arcee),
    "apertus": ({**_HEADS, "hidden_act": "xielu"}, _apertus),
    "hunyuan_v1_dense": (_HEADS, _hunyuan),
    "nanochat": (
        {
            **BASE,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "hidden_act": "relu2",
            "final_logit_softcapping": 3.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        _nanochat,
    ),
    "glm4_moe": (
        {
            **_HEADS,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        _glm4_moe,
    ),
    "glm4_moe_lite": (
        {
            **LATENT,
            "q_lora_rank": 12,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "mlp_layer_types": ["dense", "sparse"],
            "first_k_dense_replace": 1,
        },
        latent_decoder,
    ),
    "youtu": (
        {**LATENT, "q_lora_rank": 12, "tie_word_embeddings": True, "first_k_dense_replace": 2},
        latent_decoder,
    ),
    "minicpm3": (
        {
            **LATENT,
            "q_lora_rank": 12,
            "first_k_dense_replace": 2,
            "scale_emb": 3.0,
            "scale_depth": 1.4,
            "dim_model_base": 16,
        },
        latent_decoder,
    ),
    "ernie4_5_moe": (
        {
            **BASE,
            "rms_norm_eps": 1e-5,
            "use_bias": False,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 16,
            "moe_k": 3,
            "moe_num_experts": 6,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        _ernie_moe,
    ),
    "olmoe": (
        {
            **BASE,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "intermediate_size": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
        },
        _olmoe,
    ),
    "mellum": (
        {
            **_HEADS,
            **_BY_TYPE,
            "moe_intermediate_size": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_layer_types": ["sparse", "dense"],
        },
        _mellum,
    ),
    "ministral3": (_MINISTRAL3, _llama),
    "mistral3": (
        {"text_config": {"model_type": "ministral3", **_MINISTRAL3}, "tie_word_embeddings": False},
        _mistral3,
    ),
    "granite_swa": (
        {
            **BASE,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_multiplier": 0.4,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 3.0,
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "layer_rope_theta": [10000.0, 500.0, 0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        _granite_swa,
    ),
    "kimi_linear": (
        {
            **{key: value for key, value in LATENT.items() if key != "rope_parameters"},
            "num_hidden_layers": 4,
            "linear_attn_config": {
                "full_attn_layers": [3],
                "kda_layers": [1, 2, 4],
                "head_dim": 16,
                "num_heads": 2,
                "short_conv_kernel_size": 4,
            },
            "num_experts": 6,
            "num_experts_per_token": 3,
            "num_shared_experts": 2,
            "num_expert_group": 1,
            "topk_group": 1,
            "moe_renormalize": True,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
        },
        _kimi_linear,
    ),
    "bailing_hybrid": (
        {
            **LATENT,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "layer_group_size": 3,
            "kda_safe_gate": True,
            "kda_lower_bound": -2.0,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            "rope_theta": 10000.0,
        },
        _bailing_hybrid,
    ),
    "bitnet": ({**BASE, "rms_norm_eps": 1e-5, "attention_bias": False, "hidden_act": "relu2"}, _bitnet),
    "phimoe": (
        {
            **BASE,
            "hidden_size": 64,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "lm_head_bias": True,
            "intermediate_size": 24,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.3,
            "sliding_window": "null",
        },
        _phimoe,
    ),
    "muse_glimmer_text": (_MUSE, _muse_text),
    "muse_glimmer": (
        {
            "text_config": {**_MUSE, "model_type": "muse_glimmer_text"},
            "vision_config": {
                "model_type": "muse_glimmer_vision",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "max_position_embeddings": 16,
            },
            "out_hidden_size": 64,
            "projector_hidden_size": 8,
            "tie_word_embeddings": False,
        },
        _muse_glimmer,
    ),
    "lfm3": (
        {
            **_HEADS,
            "num_hidden_layers": 4,
            "norm_eps": 1e-5,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "conv_L_cache": 3,
            "conv_bias": False,
            "sliding_window": 5,
            "use_sandwich_norm": True,
            "use_attention_gate": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 20000.0,
                    "partial_rotary_factor": 0.5,
                },
            },
        },
        _lfm3,
    ),
}
