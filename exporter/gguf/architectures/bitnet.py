"""BitNet b1.58 of 1bitLLM, whose activation is SiLU: files do not state it, and llama.cpp computes no other.

Microsoft's 2B-4T (squared ReLU) has the architecture ``bitnet-b1.58`` of a fork, and tensors of other types.
"""

from __future__ import annotations

from ..architecture import Architecture

NAME = "bitnet"
ARCHITECTURE = Architecture(
    model_type="bitnet",
    inner={"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"},
    adapt=lambda config, tensors: {"hidden_act": "silu"},
)
