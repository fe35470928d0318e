"""StableLM 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import UnsupportedModelError
from ..architecture import Architecture, Tensors, has


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return whether queries, keys and values have biases, and whether both parts of a layer read one norm.

    The tensors tell the latter, as in llama.cpp, whatever the key says.

    Raises:
        UnsupportedModelError: heads of queries and keys have norms.
    """
    if has(tensors, "self_attn.q_norm.weight"):
        raise UnsupportedModelError(
            "the GGUF file has a StableLM with norms of heads, which is not supported"
        )
    parallel = not has(tensors, "post_attention_layernorm.weight")
    return {"use_qkv_bias": config["attention_bias"], "use_parallel_residual": parallel}


NAME = "stablelm"
ARCHITECTURE = Architecture(
    model_type="stablelm",
    keys={
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "use_parallel_residual": "use_parallel_residual",
    },
    adapt=_adapt,
)
