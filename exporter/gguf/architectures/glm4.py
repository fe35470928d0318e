"""GLM-4."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "glm4"
ARCHITECTURE = Architecture(
    model_type="glm4",
    inner={
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
)
