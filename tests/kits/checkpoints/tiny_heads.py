"""Tiny checkpoints with a head that predicts the token behind the next one, and what the head computes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from exporter_golden import COLUMNS, FOLDER
from family_cases import write_case
from safetensors.numpy import load_file, save_file

Array = npt.NDArray[Any]

HEADS = ("llama", "qwen3_5_text-tiles", "qwen3_5_moe_text", "qwen3_next", "deepseek_v3", "glm4_moe")
TOKENS = 12


def write_with_head(case: str, folder: Path) -> Path:
    """Write the checkpoint of a family case, with a head."""
    return add_head(write_case(case, folder))


def add_head(folder: Path) -> Path:
    """Add a head to a checkpoint, whose layer is like the last one with attention."""
    tensors: dict[str, Array] = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    hidden, rng = config["hidden_size"], np.random.default_rng(11)
    number = re.compile(r"model\.layers\.(\d+)\.self_attn\.")
    last = max(int(found[1]) for found in map(number.match, tensors) if found)
    nextn = config["model_type"] in ("deepseek_v3", "glm4_moe")
    if nextn:
        module = f"model.layers.{config['num_hidden_layers']}."
        layer, names = module, ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        config["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
    else:
        layer, module = "mtp.layers.0.", "mtp."
        names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    copied = f"model.layers.{last}."
    found = {name: array for name, array in tensors.items() if name.startswith(copied)}
    for name, array in found.items():
        noise = rng.standard_normal(array.shape) * 0.05
        tensors[name.replace(copied, layer)] = (array.astype(np.float32) + noise).astype(array.dtype)
    for name in names:
        shape = (hidden, 2 * hidden) if name == names[0] else (hidden,)
        array = (
            rng.standard_normal(shape) / np.sqrt(2 * hidden)
            if len(shape) > 1
            else rng.uniform(0.5, 1.5, shape)
        )
        tensors[f"{module}{name}.weight"] = array.astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def head_inputs(hidden: int) -> tuple[Array, Array]:
    """Return tokens [1, n] and hidden states [1, n, hidden] for the comparison."""
    rng = np.random.default_rng(12)
    tokens = rng.integers(0, 250, (1, TOKENS))
    return tokens, rng.standard_normal((1, TOKENS, hidden)).astype(np.float32)


def head_golden(case: str) -> Path:
    """Return the path of the golden file of a case's head."""
    return FOLDER / "draft_heads" / f"{case}.npz"


def transformers_head(folder: Path) -> Array:
    """Return the head's logits [n, columns]: norms and projection by torch, the layer by transformers."""
    import torch
    import transformers

    tensors = {
        n: torch.tensor(a.astype(np.float32)) for n, a in load_file(folder / "model.safetensors").items()
    }
    config = transformers.AutoConfig.from_pretrained(folder)
    count = config.num_hidden_layers
    nextn = f"model.layers.{count}.eh_proj.weight" in tensors
    module = f"model.layers.{count}." if nextn else "mtp."
    layer = module if nextn else "mtp.layers.0."
    names = ["eh_proj", "enorm", "hnorm", "shared_head.norm"] if nextn else []
    names = names or ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"]
    project, of_embedding, of_hidden, norm = (tensors[f"{module}{name}.weight"] for name in names)
    # A model whose only layer is the head's.
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = config.mlp_layer_types[-1:]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    own = {n.replace(layer, "model.layers.0.", 1): a for n, a in tensors.items() if n.startswith(layer)}
    own |= {"model.norm.weight": norm, "model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    own["lm_head.weight"] = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    with __import__("tempfile").TemporaryDirectory() as place:
        model.config.save_pretrained(place)
        save_file({n: a.numpy() for n, a in own.items()}, Path(place) / "model.safetensors", {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    shift = 1.0 if config.model_type.startswith("qwen3_") else 0.0

    def normed(x: Any, weight: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps) * (shift + weight)

    tokens, states = map(torch.tensor, head_inputs(config.hidden_size))
    with torch.inference_mode():
        embedded = own["model.embed_tokens.weight"][tokens]
        both = torch.cat([normed(embedded, of_embedding), normed(states, of_hidden)], -1)
        logits: Array = model(inputs_embeds=both @ project.T, use_cache=False).logits[0].numpy()
    return logits[:, COLUMNS]
