"""Checkpoints of every family and of every configuration that changes its graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import CONFIGS, tiny_config, write_tiny

from carryall.exporter.config import DecoderConfig, RopeConfig
from carryall.exporter.export import family

_THETA = {"rope_theta": 10000.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases-tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, **_THETA}}),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **_THETA}, "max_position_embeddings": 16},
    ),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                **_THETA,
            }
        },
    ),
    "llama-yarn": (
        "llama",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                **_THETA,
            },
        },
    ),
    # config.json as transformers 4 wrote it
    "llama-yarn-v4": (
        "llama",
        {
            "rope_parameters": None,
            "rope_theta": 5000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "beta_fast": 16.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": "null"}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {"seed": 1}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-unnormalized": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe-window-normalized": (
        "qwen2_moe",
        {
            "norm_topk_prob": True,
            "qkv_bias": False,
            "attention_bias": False,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 2,
        },
    ),
    "smollm3": ("smollm3", {}),
    "phi3": ("phi3", {}),
    "phi3-short": (
        "phi3",
        {
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75, **_THETA},
            "sliding_window": 6,
        },
    ),
    "gemma3_text": ("gemma3_text", {}),
    "gemma3_text-softcaps-v4": (
        "gemma3_text",
        {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "layer_types": None,
            "sliding_window_pattern": 2,
            "rope_parameters": None,
            "rope_theta": 500000.0,
            "rope_local_base_freq": 20000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3": ("gemma3", {}),
    "idefics3": ("idefics3", {}),
    "smolvlm": ("smolvlm", {}),
    "llava": ("llava", {}),
    "internvl": ("internvl", {}),
    "lighton_ocr": ("lighton_ocr", {}),
    "llava_next": ("llava_next", {}),
    "llava_next_video": ("llava_next_video", {}),
    "llava_onevision": ("llava_onevision", {}),
    "paddleocr_vl": ("paddleocr_vl", {}),
    "qwen2_vl": ("qwen2_vl", {}),
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "qwen3_vl": ("qwen3_vl", {}),
    "qwen3_vl_moe": ("qwen3_vl_moe", {}),
    "gpt2": ("gpt2", {}),
    "gemma2": ("gemma2", {"seed": 3}),
    # config.json as transformers 4 wrote it
    "gemma2-v4": (
        "gemma2",
        {
            "layer_types": None,
            "rope_parameters": None,
            "rope_theta": 5000.0,
            "attn_logit_softcapping": "null",
            "seed": 2,
        },
    ),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-no-window": ("starcoder2", {"sliding_window": "null"}),
    "phi": ("phi", {}),
    "gpt_neox": ("gpt_neox", {"seed": 1}),
    "gpt_neox-sequential-v4": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "rope_parameters": None,
            "rotary_pct": 0.25,
            "rotary_emb_base": 5000,
        },
    ),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5-biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "glm4-no-bias": ("glm4", {"attention_bias": False}),
    "glm_ocr": ("glm_ocr", {}),
    "exaone4": ("exaone4", {"seed": 1}),
    "exaone4-no-window": ("exaone4", {"sliding_window": "null", "layer_types": ["full_attention"] * 2}),
    "cohere2": ("cohere2", {}),
    "cohere2-four": (
        "cohere2",
        {"num_hidden_layers": 4, "layer_types": None, "sliding_window_pattern": 4, "seed": 1},
    ),
    "stablelm": ("stablelm", {}),
    "stablelm-parallel-head-norms": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    ),
    "opt": ("opt", {}),
    "opt-norms-behind-projected": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "bloom": ("bloom", {"seed": 1}),
    "bloom-six-heads": ("bloom", {"n_head": 6, "hidden_size": 48}),
    "falcon": ("falcon", {"seed": 1}),
    "falcon-groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "seed": 1}),
    "falcon-alibi-sequential": (
        "falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2-groups-yarn": (
        "deepseek_v2",
        {
            "q_lora_rank": 12,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
                "original_max_position_embeddings": 32,
                **_THETA,
            },
        },
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-halves": (
        "deepseek_v3",
        {"rope_interleave": False, "q_lora_rank": "null", "norm_topk_prob": False, "attention_bias": True},
    ),
    "gpt_oss": ("gpt_oss", {}),
    "gemma4_text": ("gemma4_text", {"seed": 1}),
    "gemma4_text-experts-one-projection": (
        "gemma4_text",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": "null",
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "gemma4": ("gemma4", {"seed": 1}),
    "qwen3_5_text": ("qwen3_5_text", {"seed": 4}),
    "qwen3_5_text-tiles": ("qwen3_5_text", {"seed": 3, "linear_value_head_dim": 16}),  # for CPU kernels
    "qwen3_5": ("qwen3_5", {"seed": 4}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {"seed": 6}),
    "qwen3_5_moe": ("qwen3_5_moe", {"seed": 6}),
    "qwen3_next": ("qwen3_next", {"seed": 7, "linear_value_head_dim": 16}),
    "granitemoe": ("granitemoe", {"seed": 1}),
    "granitemoeshared": ("granitemoeshared", {}),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "granitemoehybrid-dense-rope": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_conv_bias": False,
            "mamba_n_groups": 1,
        },
    ),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1-norm": ("falcon_h1", {"mamba_rms_norm": True}),
    "falcon_h1-norm-first": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h-latent": ("nemotron_h", {"moe_latent_size": 12, "seed": 1}),
    "kimi_linear": ("kimi_linear", {}),
    "bailing_hybrid": ("bailing_hybrid", {}),
    "bailing_hybrid-whole-group": ("bailing_hybrid", {"num_hidden_layers": 3}),
    "bailing_hybrid-unbounded": ("bailing_hybrid", {"kda_safe_gate": False, "q_lora_rank": 12}),
    "bitnet": ("bitnet", {}),
    "bitnet-silu-tied": ("bitnet", {"hidden_act": "silu", "tie_word_embeddings": True}),
    "phimoe": ("phimoe", {}),
    "phimoe-published": (
        "phimoe",
        {
            "lm_head_bias": True,
            "router_jitter_noise": 0.01,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.5, 2.0, 2.5, 1.0, 1.5, 2.0, 2.5],
                "long_factor": [4.0] * 8,
                "short_mscale": 1.0801234497346435,
                "long_mscale": 1.0801234497346435,
            },
        },
    ),
    "phimoe-long": (
        "phimoe",
        {
            "attention_bias": False,
            "lm_head_bias": False,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.5, 2.0, 2.5, 1.0, 1.5, 2.0, 2.5],
                "long_factor": [4.0] * 8,
                "short_mscale": 1.3,
                "long_mscale": 1.3,
            },
        },
    ),
    "muse_glimmer": ("muse_glimmer", {}),
    "muse_glimmer-published": (
        "muse_glimmer",
        {"text_config": {**CONFIGS["muse_glimmer"]["text_config"], "post_norm_eps": 1e-8}},
    ),
    "muse_glimmer_text": ("muse_glimmer_text", {}),
    "gemma": ("gemma", {}),
    "gemma4_unified_text": ("gemma4_unified_text", {}),
    "gemma4_unified": ("gemma4_unified", {}),
    "olmo3": ("olmo3", {}),
    "olmo3-v4": (
        "olmo3",
        {
            "layer_types": None,
            "rope_parameters": None,
            "rope_theta": 500000.0,
            "num_hidden_layers": 4,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "seed_oss": ("seed_oss", {}),
    "arcee": ("arcee", {}),
    "apertus": ("apertus", {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "hunyuan_v1_dense-alpha": (
        "hunyuan_v1_dense",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, **_THETA},
        },
    ),
    "nanochat": ("nanochat", {}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-plain": ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "youtu": ("youtu", {}),
    "minicpm3": ("minicpm3", {}),
    "minicpm3-published": ("minicpm3", {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "olmoe": ("olmoe", {}),
    "mellum": ("mellum", {}),
    "mellum-experts": ("mellum", {"mlp_layer_types": ["sparse", "sparse"]}),
    "ministral3": ("ministral3", {}),
    "mistral3": ("mistral3", {}),
    "granite_swa": ("granite_swa", {}),
    "granite_swa-one-base": ("granite_swa", {"layer_rope_theta": [10_000.0, 10_000.0, 0]}),
    "lfm3": ("lfm3", {}),
    "lfm3-plain": ("lfm3", {"use_sandwich_norm": False, "use_attention_gate": False}),
    "lfm2": ("lfm2", {}),
    "lfm2_vl": ("lfm2_vl", {}),
    "lfm2_moe": ("lfm2_moe", {"seed": 1}),
    "lfm2_moe-unnormalized": (
        "lfm2_moe",
        {"norm_topk_prob": False, "use_expert_bias": False, "routed_scaling_factor": 1.5},
    ),
    "lfm2-biases": ("lfm2", {"conv_bias": True, "conv_L_cache": 5, "tie_word_embeddings": False}),
}

# The ropes of these cases depend on the longest position of a run, so a prompt in pieces differs from the
# whole.
LENGTH_DEPENDENT = {"llama-dynamic", "phi3"}

_HYBRID = (
    *("lfm2", "lfm3", "qwen3_5", "qwen3_next", "granitemoehybrid", "falcon_h1", "nemotron_h"),
    *("kimi_linear", "bailing_hybrid"),
)
WITH_STATES = {case for case in CASES if case.startswith(_HYBRID)}

# In transformers, padding changes the states of these: it masks the input of a projection with a bias.
PADDING_CHANGES_TRANSFORMERS = {"lfm2-biases"}

# Cases that share the golden file of another, because transformers would need additional, unused weights.
GOLDEN_OF = {
    "gemma3": "gemma3_text",
    "idefics3": "llama",
    "smolvlm": "llama",
    "llava": "llama",
    "internvl": "qwen2",
    "lighton_ocr": "qwen3",
    "llava_next": "mistral",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "glm_ocr": "glm4-no-bias",
    "paddleocr_vl": "llama",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "gemma4": "gemma4_text",
    "muse_glimmer_text": "muse_glimmer",
    "gemma4_unified": "gemma4_unified_text",
    "lfm2_vl": "lfm2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "mistral3": "ministral3",
}


def write_case(name: str, folder: Path) -> Path:
    """Write the checkpoint of a case and return ``folder``."""
    model_type, overrides = CASES[name]
    return write_tiny(model_type, folder, **overrides)


def normalised(model_type: str, **overrides: Any) -> DecoderConfig:
    """Return the exporter's configuration of a tiny checkpoint."""
    return family(model_type).config(tiny_config(model_type, **overrides))


def rope(model_type: str, layer: int = 0, **overrides: Any) -> RopeConfig:
    """Return the rotary embedding of one layer of a tiny checkpoint."""
    config = normalised(model_type, **overrides).ropes[layer]
    assert config is not None
    return config
