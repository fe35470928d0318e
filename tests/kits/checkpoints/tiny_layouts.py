"""Tiny configurations of families, each with a function that returns the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tiny_families import BASE, Config, Shapes

_WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


def modules(bias: bool = False, /, **shapes: tuple[int, ...]) -> Shapes:
    """Return the weights, and biases, of modules; ``__`` in a name stands for a dot."""
    found: Shapes = {}
    for name, shape in shapes.items():
        module = name.replace("__", ".")
        found[f"{module}.weight"] = shape
        if bias:
            found[f"{module}.bias"] = shape[:1]
    return found


def decoder(
    config: Mapping[str, Any],
    layer: Callable[[int], Shapes],
    *,
    prefix: str = "model.",
    embedding: str = "embed_tokens",
    layers: str = "layers",
    norm: str = "norm",
    norm_bias: bool = False,
) -> Shapes:
    """Return the shapes of a decoder: embedding, layers, last norm and head."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {f"{prefix}{embedding}.weight": (vocab, hidden)}
    shapes |= {f"{prefix}{name}": shape for name, shape in modules(norm_bias, **{norm: (hidden,)}).items()}
    for i in range(config.get("num_hidden_layers") or config["n_layer"]):
        shapes |= {f"{prefix}{layers}.{i}.{name}": shape for name, shape in layer(i).items()}
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head.weight": (vocab, hidden)}


def attention(config: Mapping[str, Any], bias: bool = False) -> Shapes:
    """Return the shapes of Llama's attention; ``bias`` is that of q, k and v."""
    hidden, head_dim = config["hidden_size"], _head_dim(config)
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    return {
        **modules(bias, self_attn__q_proj=(q, hidden), self_attn__k_proj=(kv, hidden)),
        **modules(bias, self_attn__v_proj=(kv, hidden)),
        **modules(self_attn__o_proj=(hidden, q)),
    }


def gated_mlp(config: Mapping[str, Any], bias: bool = False) -> Shapes:
    """Return the shapes of Llama's feed-forward layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    wide = modules(bias, mlp__gate_proj=(inner, hidden), mlp__up_proj=(inner, hidden))
    return wide | modules(bias, mlp__down_proj=(hidden, inner))


def norms(config: Mapping[str, Any], *names: str, bias: bool = False) -> Shapes:
    """Return the shapes of norms over the hidden size."""
    return modules(bias, **{f"{name}_layernorm": (config["hidden_size"],) for name in names})


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _ernie(config: Mapping[str, Any]) -> Shapes:
    bias, hidden = config["use_bias"], (config["hidden_size"],)
    layer = attention(config, bias) | gated_mlp(config, bias) | norms(config, "input", "post_attention")
    layer |= {"self_attn.o_proj.bias": hidden} if bias else {}
    return decoder(config, lambda _: layer)


def _glm4(config: Mapping[str, Any], prefix: str = "model.") -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    layer = attention(config, config.get("attention_bias", True)) | modules(
        mlp__gate_up_proj=(2 * inner, hidden), mlp__down_proj=(hidden, inner)
    )
    layer |= norms(config, "input", "post_attention", "post_self_attn", "post_mlp")
    return decoder(config, lambda _: layer, prefix=prefix)


def _glm_ocr(config: Mapping[str, Any]) -> Shapes:
    text = {**config["text_config"], "attention_bias": False}
    return {**_glm4(text, "model.language_model."), "model.visual.post_layernorm.weight": (8,)}


def _exaone4(config: Mapping[str, Any]) -> Shapes:
    size = (_head_dim(config),)
    layer = attention(config) | gated_mlp(config) | norms(config, "post_attention", "post_feedforward")
    layer |= modules(self_attn__q_norm=size, self_attn__k_norm=size)
    return decoder(config, lambda _: layer)


def _cohere2(config: Mapping[str, Any]) -> Shapes:
    layer = attention(config) | gated_mlp(config) | norms(config, "input")
    return decoder(config, lambda _: layer)


def _stablelm(config: Mapping[str, Any]) -> Shapes:
    parallel = config.get("use_parallel_residual")
    layer = attention(config, config.get("use_qkv_bias", False)) | gated_mlp(config)
    layer |= norms(config, "input", *([] if parallel else ["post_attention"]), bias=True)
    if config.get("qk_layernorm"):
        for kind, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            for head in range(config[heads]):
                layer[f"self_attn.{kind}_layernorm.norms.{head}.weight"] = (_head_dim(config),)
    return decoder(config, lambda _: layer, norm_bias=True)


def _opt(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, bias = config["hidden_size"], config["ffn_dim"], config.get("enable_bias", True)
    first, width = config.get("do_layer_norm_before", True), config.get("word_embed_proj_dim")
    layer: Shapes = {}
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        layer |= modules(bias, **{f"self_attn__{name}": (hidden, hidden)})
    layer |= modules(bias, fc1=(inner, hidden), fc2=(hidden, inner))
    layer |= modules(True, self_attn_layer_norm=(hidden,), final_layer_norm=(hidden,))
    prefix = "model.decoder."
    shapes = decoder(config, lambda _: layer, prefix=prefix, norm="final_layer_norm", norm_bias=True)
    shapes[f"{prefix}embed_positions.weight"] = (config["max_position_embeddings"] + 2, hidden)
    if not first:
        del shapes[f"{prefix}final_layer_norm.weight"], shapes[f"{prefix}final_layer_norm.bias"]
    if width:
        shapes[f"{prefix}embed_tokens.weight"] = (config["vocab_size"], width)
        shapes |= {
            f"{prefix}project_in.weight": (hidden, width),
            f"{prefix}project_out.weight": (width, hidden),
        }
    return shapes


def _bloom(config: Mapping[str, Any]) -> Shapes:
    n = config["hidden_size"]
    layer = modules(True, self_attention__query_key_value=(3 * n, n), self_attention__dense=(n, n))
    layer |= modules(True, mlp__dense_h_to_4h=(4 * n, n), mlp__dense_4h_to_h=(n, 4 * n))
    layer |= norms(config, "input", "post_attention", bias=True)
    names = {"prefix": "transformer.", "embedding": "word_embeddings", "layers": "h", "norm": "ln_f"}
    shapes = decoder(config, lambda _: layer, norm_bias=True, **names)
    return shapes | modules(True, transformer__word_embeddings_layernorm=(n,))


def _falcon(config: Mapping[str, Any]) -> Shapes:
    n, heads, bias = config["hidden_size"], config["num_attention_heads"], config.get("bias", False)
    newer, parallel = config.get("new_decoder_architecture"), config.get("parallel_attn", True)
    kv_heads = config["num_kv_heads"] if newer else 1 if config.get("multi_query", True) else heads
    rows = (heads + 2 * kv_heads) * n // heads
    layer = modules(bias, self_attention__query_key_value=(rows, n), self_attention__dense=(n, n))
    layer |= modules(bias, mlp__dense_h_to_4h=(4 * n, n), mlp__dense_4h_to_h=(n, 4 * n))
    if newer and config.get("num_ln_in_parallel_attn", 2) == 2:
        layer |= modules(True, ln_attn=(n,), ln_mlp=(n,))
    else:
        layer |= norms(config, "input", *([] if parallel else ["post_attention"]), bias=True)
    names = {"prefix": "transformer.", "embedding": "word_embeddings", "layers": "h", "norm": "ln_f"}
    return decoder(config, lambda _: layer, norm_bias=True, **names)


def experts(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of DeepSeek's experts, router and shared experts."""
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    shared = width * config["n_shared_experts"]
    layer = modules(mlp__gate=(config["n_routed_experts"], hidden))
    for prefix, size in {
        **{f"mlp__experts__{i}__": width for i in range(config["n_routed_experts"])},
        "mlp__shared_experts__": shared,
    }.items():
        for name, shape in {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}.items():
            layer |= modules(**{f"{prefix}{name}_proj": shape})
    return layer


def latent_decoder(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a decoder with latent attention, dense layers first."""
    n, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotary, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries, bias = config.get("q_lora_rank"), config.get("attention_bias", False)
    size = heads * (plain + rotary)
    base = norms(config, "input", "post_attention")
    base |= modules(
        bias, self_attn__kv_a_proj_with_mqa=(rank + rotary, n), self_attn__o_proj=(n, heads * value)
    )
    base |= modules(self_attn__kv_a_layernorm=(rank,), self_attn__kv_b_proj=(heads * (plain + value), rank))
    if queries:
        base |= modules(bias, self_attn__q_a_proj=(queries, n))
        base |= modules(self_attn__q_a_layernorm=(queries,), self_attn__q_b_proj=(size, queries))
    else:
        base |= modules(self_attn__q_proj=(size, n))
    dense = config["first_k_dense_replace"]
    sparse = experts(config) if dense < config["num_hidden_layers"] else {}
    if config["model_type"] in ("deepseek_v3", "glm4_moe_lite"):
        sparse["mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
    return decoder(config, lambda i: base | (gated_mlp(config) if i < dense else sparse))


def _gpt_oss(config: Mapping[str, Any]) -> Shapes:
    n, inner, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    layer = attention(config, True) | norms(config, "input", "post_attention")
    layer |= modules(True, mlp__router=(count, n))
    layer |= {"self_attn.o_proj.bias": (n,), "self_attn.sinks": (config["num_attention_heads"],)}
    layer |= {
        "mlp.experts.gate_up_proj": (count, n, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
        "mlp.experts.down_proj": (count, inner, n),
        "mlp.experts.down_proj_bias": (count, n),
    }
    return decoder(config, lambda _: layer)


def _gemma4(config: Mapping[str, Any], prefix: str = "model.") -> Shapes:
    hidden, width = config["hidden_size"], config.get("hidden_size_per_layer_input", 256)
    count = config["num_hidden_layers"]
    own = count - config.get("num_kv_shared_layers", 0)

    def layer(i: int) -> Shapes:
        full, one = config["layer_types"][i] == "full_attention", config.get("attention_k_eq_v", False)
        size = config["global_head_dim"] if full else config["head_dim"]
        kv_heads = (full and one and config["num_global_key_value_heads"]) or config["num_key_value_heads"]
        sizes = {**config, "head_dim": size, "num_key_value_heads": kv_heads}
        if i >= own and config.get("use_double_wide_mlp"):
            sizes["intermediate_size"] *= 2
        shapes = attention(sizes) | gated_mlp(sizes) | {"layer_scalar": (1,)}
        shapes |= modules(self_attn__q_norm=(size,), self_attn__k_norm=(size,))
        shapes |= norms(config, "input", "post_attention", "pre_feedforward", "post_feedforward")
        unused = ("k_proj", "v_proj", "k_norm") if i >= own else ("v_proj",) if full and one else ()
        for name in unused:
            del shapes[f"self_attn.{name}.weight"]
        if width:
            shapes |= modules(
                per_layer_input_gate=(width, hidden),
                per_layer_projection=(hidden, width),
                post_per_layer_input_norm=(hidden,),
            )
        return shapes | (_gemma4_experts(config) if config.get("enable_moe_block") else {})

    shapes = decoder(config, layer, prefix=prefix)
    if width:
        shapes[f"{prefix}embed_tokens_per_layer.weight"] = (config["vocab_size"], count * width)
        shapes[f"{prefix}per_layer_model_projection.weight"] = (count * width, hidden)
        shapes[f"{prefix}per_layer_projection_norm.weight"] = (width,)
    return shapes


def _gemma4_experts(config: Mapping[str, Any]) -> Shapes:
    hidden, count, inner = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    names = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
    return {
        "router.scale": (hidden,),
        "router.per_expert_scale": (count,),
        "router.proj.weight": (count, hidden),
        "experts.gate_up_proj": (count, 2 * inner, hidden),
        "experts.down_proj": (count, hidden, inner),
        **{f"{name}.weight": (hidden,) for name in names},
    }


def _gemma4_seeing(config: Mapping[str, Any]) -> Shapes:
    shapes = _gemma4(config["text_config"], "model.language_model.")
    return {**shapes, "model.vision_tower.std_bias": (8,), "model.embed_vision.norm.weight": (8,)}


def _gemma4_unified(config: Mapping[str, Any], prefix: str = "model.") -> Shapes:
    return _gemma4({**config, "hidden_size_per_layer_input": 0}, prefix)


def _gemma4_unified_seeing(config: Mapping[str, Any]) -> Shapes:
    shapes = _gemma4_unified(config["text_config"], "model.language_model.")
    return {**shapes, "model.vision_embedder.pos_norm.weight": (8,), "model.embed_audio.norm.weight": (8,)}


_GEMMA4: Config = {
    **{key: value for key, value in BASE.items() if key != "rope_parameters"},
    "num_hidden_layers": 5,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 5,
    "layer_types": [
        *("sliding_attention", "full_attention", "sliding_attention"),
        *("sliding_attention", "full_attention"),
    ],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 260,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}

_GEMMA4_UNIFIED = {key: value for key, value in _GEMMA4.items() if "per_layer_input" not in key}

_FEW = {key: BASE[key] for key in ("vocab_size", "hidden_size")}

LATENT: Config = {
    **BASE,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 4,
    "q_lora_rank": "null",
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 0,
}


def _qwen3_5(config: Mapping[str, Any], prefix: str = "model.") -> Shapes:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    size, head_dim = config["linear_value_head_dim"], config["head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    channels = 2 * keys + heads * size
    if config.get("model_type") == "qwen3_next":
        projections = modules(
            linear_attn__in_proj_qkvz=(channels + heads * size, hidden),
            linear_attn__in_proj_ba=(2 * heads, hidden),
        )
    else:
        projections = modules(
            linear_attn__in_proj_qkv=(channels, hidden),
            linear_attn__in_proj_z=(heads * size, hidden),
            linear_attn__in_proj_a=(heads, hidden),
            linear_attn__in_proj_b=(heads, hidden),
        )

    def layer(i: int) -> Shapes:
        shapes = _qwen3_5_experts(config) if "num_experts" in config else gated_mlp(config)
        shapes |= norms(config, "input", "post_attention")
        if config["layer_types"][i] == "full_attention":
            shapes |= attention(config) | modules(
                self_attn__q_norm=(head_dim,), self_attn__k_norm=(head_dim,)
            )
            rows, columns = shapes["self_attn.q_proj.weight"]
            return shapes | {"self_attn.q_proj.weight": (2 * rows, columns)}
        return shapes | {
            **projections,
            **modules(linear_attn__out_proj=(hidden, heads * size), linear_attn__norm=(size,)),
            "linear_attn.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
        }

    return decoder(config, layer, prefix=prefix)


def _qwen3_5_experts(config: Mapping[str, Any]) -> Shapes:
    hidden, count, inner = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    shared = config["shared_expert_intermediate_size"]
    shapes = modules(mlp__gate=(count, hidden), mlp__shared_expert_gate=(1, hidden))
    shapes |= _gated("mlp__shared_expert__", hidden, shared)
    if config.get("model_type") == "qwen3_next":
        for i in range(count):
            shapes |= _gated(f"mlp__experts__{i}__", hidden, inner)
        return shapes
    return shapes | {
        "mlp.experts.gate_up_proj": (count, 2 * inner, hidden),
        "mlp.experts.down_proj": (count, hidden, inner),
    }


def _gated(prefix: str, hidden: int, inner: int) -> Shapes:
    wide = dict.fromkeys((f"{prefix}gate_proj", f"{prefix}up_proj"), (inner, hidden))
    return modules(**wide, **{f"{prefix}down_proj": (hidden, inner)})


def _qwen3_5_seeing(config: Mapping[str, Any]) -> Shapes:
    text = {**config["text_config"], "tie_word_embeddings": config["tie_word_embeddings"]}
    return {
        **_qwen3_5(text, "model.language_model."),
        "model.visual.norm.weight": (8,),
        "mtp.norm.weight": (32,),
    }


def _lfm2_seeing(config: Mapping[str, Any]) -> Shapes:
    shapes = _lfm2(config["text_config"], "model.language_model.")
    return {**shapes, "model.vision_tower.post_layernorm.weight": (8,)}


def _lfm2(config: Mapping[str, Any], prefix: str = "model.") -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size, bias = hidden // config["num_attention_heads"], config["conv_bias"]

    def gated(scope: str, inner: int) -> Shapes:
        wide = dict.fromkeys((f"{scope}__w1", f"{scope}__w3"), (inner, hidden))
        return modules(**{f"{scope}__w2": (hidden, inner)}, **wide)

    def feed_forward(i: int) -> Shapes:
        if i < config.get("num_dense_layers", i + 1):
            return gated("feed_forward", inner)
        count = config["num_experts"]
        shapes = modules(feed_forward__gate=(count, hidden))
        for expert in range(count):
            shapes |= gated(f"feed_forward__experts__{expert}", config["moe_intermediate_size"])
        return shapes | ({"feed_forward.expert_bias": (count,)} if config["use_expert_bias"] else {})

    def layer(i: int) -> Shapes:
        shapes = modules(operator_norm=(hidden,), ffn_norm=(hidden,)) | feed_forward(i)
        if config["layer_types"][i] == "full_attention":
            shapes |= attention(config) | modules(
                self_attn__q_layernorm=(size,), self_attn__k_layernorm=(size,)
            )
            shapes["self_attn.out_proj.weight"] = shapes.pop("self_attn.o_proj.weight")
            return shapes
        shapes |= modules(bias, conv__in_proj=(3 * hidden, hidden), conv__out_proj=(hidden, hidden))
        shapes["conv.conv.weight"] = (hidden, 1, config["conv_L_cache"])
        return shapes | ({"conv.conv.bias": (hidden,)} if bias else {})

    return decoder(config, layer, norm="embedding_norm", prefix=prefix)


def _mamba(
    hidden: int,
    heads: int,
    size: int,
    groups: int,
    state: int,
    taps: int,
    *,
    norm: bool = True,
    bias: bool = True,
) -> Shapes:
    inner, channels = heads * size, heads * size + 2 * groups * state
    shapes = modules(in_proj=(inner + channels + heads, hidden), out_proj=(hidden, inner))
    shapes |= {"conv1d.weight": (channels, 1, taps), "A_log": (heads,), "D": (heads,), "dt_bias": (heads,)}
    shapes |= {"conv1d.bias": (channels,)} if bias else {}
    return shapes | (modules(norm=(inner,)) if norm else {})


def _mamba_of(config: Mapping[str, Any], scope: str, *, norm: bool = True) -> Shapes:
    shapes = _mamba(
        config["hidden_size"],
        config["mamba_n_heads"],
        config["mamba_d_head"],
        config["mamba_n_groups"],
        config["mamba_d_state"],
        config["mamba_d_conv"],
        norm=norm,
        bias=config["mamba_conv_bias"],
    )
    if config["mamba_proj_bias"]:
        shapes["in_proj.bias"] = shapes["in_proj.weight"][:1]
    return {f"{scope}.{name}": shape for name, shape in shapes.items()}


def _granite_moe(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    shared, types = config.get("shared_intermediate_size", 0), config.get("layer_types")

    def layer(i: int) -> Shapes:
        shapes = norms(config, "input", "post_attention")
        attends = types is None or types[i] == "attention"
        shapes |= attention(config) if attends else _mamba_of(config, "mamba")
        if count:
            shapes |= modules(block_sparse_moe__router__layer=(count, hidden))
            shapes["block_sparse_moe.input_linear.weight"] = (count, 2 * inner, hidden)
            shapes["block_sparse_moe.output_linear.weight"] = (count, hidden, inner)
        if shared:
            shapes |= modules(shared_mlp__input_linear=(2 * shared, hidden))
            shapes |= modules(shared_mlp__output_linear=(hidden, shared))
        return shapes

    return decoder(config, layer)


def _falcon_h1(config: Mapping[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    layer = modules(input_layernorm=(hidden,), pre_ff_layernorm=(hidden,)) | attention(config)
    layer |= _mamba_of(config, "mamba", norm=config["mamba_rms_norm"])
    layer |= _gated("feed_forward__", hidden, inner)
    return decoder(config, lambda _: layer, norm="final_layernorm")


def _nemotron_h(config: Mapping[str, Any]) -> Shapes:
    hidden, count = config["hidden_size"], config["n_routed_experts"]
    heads, size, groups = config["mamba_num_heads"], config["mamba_head_dim"], config["n_groups"]
    kinds = config["layers_block_type"]

    latent = config.get("moe_latent_size") or hidden

    def plain(scope: str, inner: int, outer: int = hidden) -> Shapes:
        return modules(**{f"{scope}up_proj": (inner, outer), f"{scope}down_proj": (outer, inner)})

    def mixer(kind: str) -> Shapes:
        if kind == "mamba":
            state, taps = config["ssm_state_size"], config["conv_kernel"]
            return _mamba(hidden, heads, size, groups, state, taps, bias=config["use_conv_bias"])
        if kind == "mlp":
            return plain("", config["intermediate_size"])
        if kind == "attention":
            return {name.removeprefix("self_attn."): shape for name, shape in attention(config).items()}
        shapes = modules(gate=(count, hidden)) | {"gate.e_score_correction_bias": (count,)}
        shapes |= plain("shared_experts__", config["moe_shared_expert_intermediate_size"])
        for expert in range(count):
            shapes |= plain(f"experts__{expert}__", config["moe_intermediate_size"], latent)
        if latent != hidden:
            shapes |= modules(fc1_latent_proj=(latent, hidden), fc2_latent_proj=(hidden, latent))
        return shapes

    def layer(i: int) -> Shapes:
        parts = {f"mixer.{name}": shape for name, shape in mixer(kinds[i]).items()}
        return modules(norm=(hidden,)) | parts

    sized = {**config, "num_hidden_layers": len(kinds)}
    return decoder(sized, layer, prefix="backbone.", embedding="embeddings", norm="norm_f")


_QWEN3_5: Config = {
    **BASE,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_types": [*("linear_attention", "linear_attention", "full_attention", "linear_attention")],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}

_QWEN3_5_MOE: Config = {
    **_QWEN3_5,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}

_LFM2: Config = {
    **BASE,
    "num_hidden_layers": 3,
    "norm_eps": 1e-5,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "tie_word_embeddings": True,
}

_GRANITE_MOE: Config = {
    **BASE,
    "intermediate_size": 16,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "attention_multiplier": 0.4,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "tie_word_embeddings": True,
}

_MAMBA: Config = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}

_GLM4: Config = {
    **BASE,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {**BASE["rope_parameters"], "partial_rotary_factor": 0.5},
}

LAYOUTS: dict[str, tuple[Config, Callable[[Mapping[str, Any]], Shapes]]] = {
    "ernie4_5": ({**BASE, "head_dim": 8, "rms_norm_eps": 1e-5, "use_bias": False}, _ernie),
    "glm4": (_GLM4, _glm4),
    "glm_ocr": (
        {
            "text_config": {
                **_GLM4,
                "model_type": "glm_ocr_text",
                "rope_parameters": {**_GLM4["rope_parameters"], "mrope_section": [1, 1, 0]},
            }
        },
        _glm_ocr,
    ),
    "exaone4": ({**BASE, **_WINDOWS, "head_dim": 16, "rms_norm_eps": 1e-5}, _exaone4),
    "cohere2": (
        {**BASE, **_WINDOWS, "layer_norm_eps": 1e-5, "logit_scale": 0.25, "tie_word_embeddings": True},
        _cohere2,
    ),
    "stablelm": (
        {
            **BASE,
            "layer_norm_eps": 1e-5,
            "rope_parameters": {**BASE["rope_parameters"], "partial_rotary_factor": 0.25},
        },
        _stablelm,
    ),
    "opt": (
        {
            **_FEW,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "activation_function": "relu",
            "tie_word_embeddings": True,
        },
        _opt,
    ),
    "bloom": ({**_FEW, "n_layer": 2, "n_head": 4, "seq_length": 128, "tie_word_embeddings": True}, _bloom),
    "falcon": (
        {
            **_FEW,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": True,
        },
        _falcon,
    ),
    "deepseek_v2": (
        {**LATENT, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 3},
        latent_decoder,
    ),
    "deepseek_v3": (
        {
            **LATENT,
            "q_lora_rank": 12,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
        latent_decoder,
    ),
    "gemma4_text": (_GEMMA4, _gemma4),
    "gemma4": ({"text_config": {"model_type": "gemma4_text", **_GEMMA4}}, _gemma4_seeing),
    "gemma4_unified_text": (_GEMMA4_UNIFIED, _gemma4_unified),
    "gemma4_unified": (
        {"text_config": {"model_type": "gemma4_unified_text", **_GEMMA4_UNIFIED}},
        _gemma4_unified_seeing,
    ),
    "qwen3_5_text": (_QWEN3_5, _qwen3_5),
    "qwen3_5": (
        {"text_config": {"model_type": "qwen3_5_text", **_QWEN3_5}, "tie_word_embeddings": False},
        _qwen3_5_seeing,
    ),
    "qwen3_5_moe_text": (_QWEN3_5_MOE, _qwen3_5),
    "qwen3_5_moe": (
        {"text_config": {"model_type": "qwen3_5_moe_text", **_QWEN3_5_MOE}, "tie_word_embeddings": False},
        _qwen3_5_seeing,
    ),
    "qwen3_next": ({**_QWEN3_5_MOE, "norm_topk_prob": True}, _qwen3_5),
    "lfm2": ({**_LFM2, "block_auto_adjust_ff_dim": False}, _lfm2),
    "lfm2_vl": (
        {
            "text_config": {"model_type": "lfm2", **_LFM2, "block_auto_adjust_ff_dim": False},
            "tie_word_embeddings": True,
        },
        _lfm2_seeing,
    ),
    "lfm2_moe": (
        {
            **_LFM2,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        },
        _lfm2,
    ),
    "granitemoe": (_GRANITE_MOE, _granite_moe),
    "granitemoeshared": ({**_GRANITE_MOE, "shared_intermediate_size": 24}, _granite_moe),
    "granitemoehybrid": (
        {
            **_GRANITE_MOE,
            **_MAMBA,
            "num_hidden_layers": 3,
            "shared_intermediate_size": 24,
            "layer_types": ["mamba", "attention", "mamba"],
        },
        _granite_moe,
    ),
    "falcon_h1": (
        {
            **BASE,
            **_MAMBA,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": False,
            "attention_bias": False,
            "mlp_bias": False,
            "projectors_bias": False,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "key_multiplier": 0.6,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.7,
            "ssm_multipliers": [0.9, 0.8, 1.2, 0.7, 1.1],
            "mlp_multipliers": [0.9, 0.6],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        _falcon_h1,
    ),
    "nemotron_h": (
        {
            **BASE,
            "num_hidden_layers": None,
            "head_dim": 16,
            "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
            "layer_norm_epsilon": 1e-5,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
        _nemotron_h,
    ),
    "gpt_oss": (
        {
            **BASE,
            **_WINDOWS,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 2.0,
        },
        _gpt_oss,
    ),
}
