"""Write a Hugging Face checkpoint of a Llama or Qwen3 with random weights as a float16 GGUF file.

    python make_gguf.py CHECKPOINT OUT.gguf

Runs in the environment with torch and gguf. For speed only: the tokens have no text, and the query and key
weights of a Llama keep the order of the checkpoint, which for random weights is another random model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors import safe_open


def write_gguf(checkpoint: Path, out: Path) -> None:
    """Write all weights of a checkpoint and the facts that llama.cpp needs to run them."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(out, config["model_type"])
    _add_facts(writer, config)
    _add_tokens(writer, config["vocab_size"])
    (kind,) = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == config["model_type"])
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 -- the file is no dict
                values = tensors.get_tensor(name).float().numpy()
                kept = np.float32 if values.ndim == 1 else np.float16
                writer.add_tensor(names.get_name(name, (".weight",)), values.astype(kept))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_facts(writer: gguf.GGUFWriter, config: dict) -> None:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def _add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"token{index}" for index in range(count)])
    writer.add_token_types([gguf.TokenType.NORMAL] * count)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
