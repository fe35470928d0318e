"""Write a Hugging Face checkpoint of a Llama, Qwen3, Qwen3-MoE, Qwen 3.5 or LFM2 as a float16 GGUF file.

    python make_gguf.py CHECKPOINT OUT.gguf

Runs in the environment with torch and gguf. The tokens are not those of the checkpoint, but bytes and names:
for measurements with token ids.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors import safe_open

_ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
}  # the others have the name of the model type
_HYBRIDS = ("lfm2", "qwen3_5_text")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")


def write_gguf(checkpoint: Path, out: Path) -> None:
    """Write all weights of a checkpoint and the facts that llama.cpp needs to run them."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(out, architecture, use_temp_file=True)
    _add_facts(writer, config)
    _add_tokens(writer, config["vocab_size"])
    (kind,) = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    experts: dict[str, dict[int, np.ndarray]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 -- the file is no dict
                values = _paired(tensors.get_tensor(name).float().numpy(), name, config)
                if config["model_type"] in _HYBRIDS:
                    name, values = _of_hybrid(name, values, config)
                small = values.ndim == 1 or ".conv" in name
                values = values.astype(np.float32 if small else np.float16)
                if expert := _EXPERT.fullmatch(name):  # GGUF has the experts of a layer in one tensor
                    name = expert[1] + expert[3]
                    parts = experts.setdefault(name, {})
                    parts[int(expert[2])] = values
                    if len(parts) < config["num_experts"]:
                        continue
                    values = np.stack([part for _, part in sorted(experts.pop(name).items())])
                writer.add_tensor(names.get_name(name, (".weight", ".bias")), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _paired(values: np.ndarray, name: str, config: dict) -> np.ndarray:
    """Return a weight in llama.cpp's order: it rotates neighbours in the queries and keys of a Llama."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    rows = heads.get(name.split(".")[-2])
    if rows is None or config["model_type"] != "llama":
        return values
    return values.reshape(rows, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)


def _of_hybrid(name: str, values: np.ndarray, config: dict) -> tuple[str, np.ndarray]:
    """Return a weight of a hybrid, and its name, as llama.cpp's converter changes them."""
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        values = values[:, 0]
    if config["model_type"] == "lfm2":
        return name, values
    if "linear_attn" not in name:
        return name, values + 1 if name.endswith("norm.weight") else values
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if name.endswith("A_log"):
        values = -np.exp(values)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        values = np.concatenate([values[:keys], _in_turns(values[keys:], config)])
    elif name.endswith("out_proj.weight"):
        values = _in_turns(values.T, config).T
    elif not name.endswith("norm.weight"):
        values = _in_turns(values, config)
    return name.replace("dt_bias", "dt_proj.bias"), np.ascontiguousarray(values)


def _in_turns(rows: np.ndarray, config: dict) -> np.ndarray:
    """Order heads of values so that those of equal rank in their groups are together."""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return rows.reshape(groups, heads // groups, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def _add_facts_of_hybrid(writer: gguf.GGUFWriter, config: dict) -> None:
    types = config["layer_types"]
    if config["model_type"] == "lfm2":
        heads = config["num_key_value_heads"]
        writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in types])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        return
    heads = config["linear_num_value_heads"]
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    recurrent = [kind == "linear_attention" for kind in types]
    writer.add_array("qwen35.attention.recurrent_layers", recurrent)
    writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])


def _add_facts(writer: gguf.GGUFWriter, config: dict) -> None:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if config["model_type"] in _HYBRIDS:
        _add_facts_of_hybrid(writer, config)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    rope = config.get("rope_parameters") or config
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def _add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    """Two special tokens, the letters of GPT-2's bytes, one merge, and names."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [*map(chr, plain), *(chr(256 + number) for number in range(256 - len(plain)))]
    tokens = ["<bos>", "<eos>", *letters, "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, *(f"token{index}" for index in range(len(tokens), count))])
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (count - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
