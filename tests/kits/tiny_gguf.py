"""Tiny random checkpoints as GGUF files, written with the gguf package and its own table of names."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from tiny_models import BOS, CHAT_TEMPLATE, EOS, PAD, random_weights, tiny_config
from tokenizers import pre_tokenizers

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
}  # where GGUF's name is another
# Offsets of the float16 factors in a block of the types that the gguf package reads but does not write.
ONE = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    **dict.fromkeys(("IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"), (0,)),
}
HYBRID = ("lfm2", "qwen3_5_text")
ROTATES_PAIRS = ("llama", "smollm3")


def write_gguf(
    model_type: str,
    path: Path,
    *,
    types: dict[str, str] | str = "F32",
    split: int = 0,
    extra: dict[str, npt.NDArray[Any]] | None = None,
    metadata: dict[str, Any] | None = None,
    **overrides: Any,
) -> dict[str, npt.NDArray[np.float32]]:
    """Write a random checkpoint.

    Args:
        model_type: as for ``write_tiny``.
        path: of the file; of the first shard where ``split`` is given.
        types: GGML's type of all matrices, or by a part of their name.
        split: most tensors of a shard.
        extra: tensors beside the checkpoint's, under GGUF's names.
        metadata: values of keys without the architecture's prefix, set last; None leaves a key out.
        overrides: of config.json.

    Returns:
        The weights under Hugging Face's names, as the file holds them.
    """
    seed = overrides.pop("seed", 0)
    config = tiny_config(model_type, **overrides)
    name = ARCHITECTURES.get(model_type, model_type)
    writer = gguf.GGUFWriter(path, name, split_max_tensors=split)
    _write_config(writer, config, name)
    _write_tokenizer(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(
        next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name),
        config["num_hidden_layers"],
    )
    held: dict[str, npt.NDArray[np.float32]] = {}
    # Those of hybrid models are compared with a checkpoint's, which holds 16 bits.
    dtype = ml_dtypes.bfloat16 if model_type in HYBRID else np.float32
    weights = random_weights(config, seed, dtype)
    if model_type == "gpt_oss":
        held |= _write_gpt_oss_experts(writer, weights, types)
    for hf_name, stack in _stacks(weights).items():
        target = names.get_name(hf_name, try_suffixes=(".weight",))
        assert target is not None, hf_name
        floats = _add(writer, target, stack, _type_of(hf_name, stack.ndim, types))
        for index, matrix in enumerate(floats):
            held[hf_name.replace("experts", f"experts.{index}")] = matrix
    for hf_name, weight in weights.items():
        if hf_name in held:
            continue
        if config["tie_word_embeddings"] and hf_name == "lm_head.weight":
            continue
        if model_type in HYBRID:
            hf_name, weight = _hybrid_tensor(hf_name, weight.astype(np.float32), config)
        matrix = _rotating_pairs(weight, hf_name, config) if model_type in ROTATES_PAIRS else weight
        stored = matrix + 1 if name in ("gemma2", "gemma3") and hf_name.endswith("norm.weight") else matrix
        target = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert target is not None, hf_name
        target += ".weight" if target.endswith("sinks") else ""
        floats = _add(writer, target, stored, _type_of(hf_name, weight.ndim, types))
        held[hf_name] = _halves(floats, hf_name, config) if model_type in ROTATES_PAIRS else floats
        if stored is not matrix:
            held[hf_name] = floats - np.float32(1)
    for target, array in (extra or {}).items():
        writer.add_tensor(target, array)
    for key, value in (metadata or {}).items():
        set_value(writer, f"{name}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def rewrite(
    source: Path,
    target: Path,
    metadata: dict[str, Any],
    change: Callable[[gguf.ReaderTensor], tuple[npt.NDArray[Any], GGMLQuantizationType]] | None = None,
) -> None:
    """Write a file again with other values of keys, without the prefix; None leaves one out.

    Args:
        source: the file.
        target: the one to write.
        metadata: values by key.
        change: returns the data and the type of a tensor; by default its own.
    """
    reader = gguf.GGUFReader(source)
    name = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, name)
    for key, entry in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            inner = entry.types[-1] if len(entry.types) > 1 else None
            writer.add_key_value(key, entry.contents(), entry.types[0], inner)
    for key, value in metadata.items():
        set_value(writer, f"{name}.{key}", value)
    for tensor in reader.tensors:
        data, kind = (tensor.data, tensor.tensor_type) if change is None else change(tensor)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def widen_experts(source: Path, target: Path, entering: str, leaving: str, *, times: int) -> None:
    """Write a file again with wider experts, whose matrices are repeated, in blocks.

    Args:
        source: a file with experts in floats.
        target: the one to write.
        entering: the type of gate and up.
        leaving: the type of down.
        times: how often each matrix is repeated.
    """
    keys = gguf.GGUFReader(source).fields
    name = str(keys["general.architecture"].contents())
    own = f"{name}.expert_feed_forward_length"
    # Mixtures without dense layers have one width.
    ends = (
        own if own in keys else f"{name}.feed_forward_length",
        f"{name}.expert_shared_feed_forward_length",
    )

    def change(tensor: gguf.ReaderTensor) -> tuple[npt.NDArray[Any], GGMLQuantizationType]:
        routed = tensor.name.endswith("_exps.weight")
        if not routed and not re.search(r"_(gate|up|down)_shexp\.weight", tensor.name):
            return tensor.data, tensor.tensor_type
        floats, down = gguf.dequantize(tensor.data, tensor.tensor_type), "_down_" in tensor.name
        wide = np.concatenate([floats] * times, axis=-1 if down else -2)
        if "_gate_up_" in tensor.name:  # gate above up
            gate, up = np.split(floats, 2, axis=-2)
            wide = np.concatenate([gate] * times + [up] * times, axis=-2)
        kind = GGMLQuantizationType[(leaving if down else entering) if routed else "F32"]
        return quantize(wide / np.float32(times if down else 1), kind), kind

    changed = {key.removeprefix(f"{name}."): times * int(keys[key].contents()) for key in ends if key in keys}
    rewrite(source, target, changed, change)


def quantize_matrices(source: Path, target: Path, *kinds: str) -> None:
    """Write a file again with its matrices of whole blocks in these types of 32 weights, in turns."""
    types = itertools.cycle(GGMLQuantizationType[kind] for kind in kinds)

    def change(tensor: gguf.ReaderTensor) -> tuple[npt.NDArray[Any], GGMLQuantizationType]:
        apart = "norm" in tensor.name or "conv" in tensor.name or not tensor.name.endswith(".weight")
        if apart or len(tensor.shape) < 2 or tensor.shape[0] % 32:
            return tensor.data, tensor.tensor_type
        kind = next(types)
        return quantize(gguf.dequantize(tensor.data, tensor.tensor_type), kind), kind

    rewrite(source, target, {}, change)


def embedding(rows: int) -> Any:
    """Return the tensors of a file that has only an embedding."""
    return {"model.embed_tokens.weight": np.zeros((rows, 4), np.float32)}


def set_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Set a key of the metadata; None removes it."""
    writer.kv_data[0].pop(key, None)
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, list(value))


def _hybrid_tensor(
    name: str, weight: npt.NDArray[Any], config: dict[str, Any]
) -> tuple[str, npt.NDArray[Any]]:
    """Return a tensor of a hybrid model, and its name, as llama.cpp's converter changes them."""
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        weight = weight[:, 0]
    if name.endswith("A_log"):
        weight = -np.exp(weight)
    if "linear_attn" not in name:
        is_norm = name.endswith("norm.weight") and config["model_type"] == "qwen3_5_text"
        return name, weight + 1 if is_norm else weight
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        weight = np.concatenate([weight[:keys], _in_turns(weight[keys:], config)])
    elif name.endswith("out_proj.weight"):
        weight = _in_turns(weight.T, config).T
    elif not name.endswith("norm.weight"):
        weight = _in_turns(weight, config)
    return name.replace("dt_bias", "dt_proj.bias"), weight


def _in_turns(rows: npt.NDArray[Any], config: dict[str, Any]) -> npt.NDArray[Any]:
    """Order heads of values so that those of equal rank in their groups are together."""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    by_head = rows.reshape(groups, heads // groups, -1, *rows.shape[1:])
    return np.ascontiguousarray(by_head.swapaxes(0, 1).reshape(rows.shape))


def _write_hybrid_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    types = config["layer_types"]
    if config["model_type"] == "lfm2":
        heads = config["num_key_value_heads"]
        writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in types])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        return
    values = config["linear_num_value_heads"]
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(values * config["linear_value_head_dim"])
    recurrent = [kind == "linear_attention" for kind in types]
    writer.add_array("qwen35.attention.recurrent_layers", recurrent)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _write_gpt_oss_experts(
    writer: gguf.GGUFWriter, weights: dict[str, npt.NDArray[Any]], types: dict[str, str] | str
) -> dict[str, npt.NDArray[np.float32]]:
    """Write stacks [experts, out, in], with gate and up apart, as llama.cpp's converter does."""
    held: dict[str, npt.NDArray[np.float32]] = {}
    for name, stored in weights.items():
        layer, part = name.removeprefix("model.layers.").partition(".mlp.experts.")[::2]
        if not part:
            continue
        stack = held[name] = stored.astype(np.float32)
        both = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        columns = both if part.startswith("gate_up") else {"down": slice(None)}
        for which, chosen in columns.items():
            target = f"blk.{layer}.ffn_{which}_exps"
            if part.endswith("bias"):
                writer.add_tensor(f"{target}.bias", np.ascontiguousarray(stack[:, chosen]))
                continue
            matrices = np.ascontiguousarray(stack[..., chosen].swapaxes(1, 2))
            floats = _add(writer, f"{target}.weight", matrices, _type_of(name, 3, types))
            stack[..., chosen] = floats.swapaxes(1, 2)
    return held


def _stacks(weights: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return the experts' matrices as stacks, by name without the expert's number."""
    found: dict[str, list[npt.NDArray[Any]]] = {}
    for name, matrix in weights.items():
        stack = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        if stack != name:
            found.setdefault(stack, []).append(matrix)
    return {name: np.stack(parts) for name, parts in found.items()}


def _type_of(name: str, rank: int, types: dict[str, str] | str) -> str:
    if rank < 2:
        return "F32"
    if isinstance(types, str):
        return types
    return next((kind for part, kind in types.items() if part in name), "F32")


def _add(writer: gguf.GGUFWriter, name: str, array: npt.NDArray[Any], kind: str) -> npt.NDArray[np.float32]:
    qtype = GGMLQuantizationType[kind]
    rows = array.astype(np.float32)
    data = random_rows(kind, rows.shape, len(name)) if kind in ONE else quantize(rows, qtype)
    writer.add_tensor(name, data, raw_dtype=qtype)
    return gguf.quants.dequantize(data, qtype).reshape(array.shape).astype(np.float32)


def random_rows(kind: str, shape: tuple[int, ...], seed: int) -> npt.NDArray[np.uint8]:
    """Return random blocks of a type that the gguf package cannot write; the weights' deviation is 0.05."""
    rng, (weights, size) = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (math.prod(shape) // weights, size), np.uint8)
    for offset in ONE[kind]:
        blocks[:, offset : offset + 2] = np.ones(1, np.float16).view(np.uint8)
    spread = float(gguf.quants.dequantize(blocks, GGMLQuantizationType[kind]).std())
    for offset in ONE[kind]:
        scales = (rng.uniform(0.7, 1.3, (len(blocks), 1)) * 0.05 / spread).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _rotating_pairs(weight: npt.NDArray[Any], name: str, config: dict[str, Any]) -> npt.NDArray[Any]:
    """Rows of q and k as llama.cpp orders them: the halves of each head interleaved."""
    heads = _heads(name, config)
    if not heads:
        return weight
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _halves(weight: npt.NDArray[Any], name: str, config: dict[str, Any]) -> npt.NDArray[Any]:
    heads = _heads(name, config)
    if not heads:
        return weight
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _heads(name: str, config: dict[str, Any]) -> int:
    if "q_proj" in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if "k_proj" in name else 0


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any], name: str) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters", {})
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    if config["model_type"] in HYBRID:
        _write_hybrid_config(writer, config)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        writer.add_expert_feed_forward_length(width)
    if "original_max_position_embeddings" in config:
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _write_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """The tokenizer of ``tiny_models.write_tokenizer``, and one merge."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "<pad>", "th"]
    kinds = [1] * 256 + [3] * 3 + [1]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens[:vocab_size])
    writer.add_token_types(kinds[:vocab_size])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_chat_template(CHAT_TEMPLATE)
