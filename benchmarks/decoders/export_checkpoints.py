"""Write synthetic llama-shaped checkpoints of random numbers, one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models


class Shape(NamedTuple):
    """Sizes of a llama-shaped model: one key and value head for each query head, a tied head."""

    hidden: int
    width: int
    heads: int
    vocab: int


SHAPES = {
    "small": Shape(2048, 8192, 16, 32_000),
    "0.6b": Shape(1024, 3072, 16, 151_936),  # 28 layers: hidden size, width and vocabulary of Qwen3-0.6B
    "7b": Shape(4096, 11_008, 32, 32_000),  # 32 layers: those of Llama-2-7B
}
GROUP = 128  # inputs that share a scale in AWQ and GPTQ
FORMATS = ("bf16", "gguf", "gptq", "awq")
_PIECE = 1 << 20  # values that are drawn once and repeated
_RNG = np.random.default_rng(0)
_CONFIG = {
    "model_type": "llama",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
}


class Stored(NamedTuple):
    """A tensor of a safetensors file: its dtype and shape there, and the pattern that fills it."""

    dtype: str
    shape: tuple[int, ...]
    pattern: bytes

    @property
    def size(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * {"BF16": 2, "F16": 2, "I32": 4}[self.dtype]


def shapes(sizes: Shape, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights."""
    hidden, width = sizes.hidden, sizes.width
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        scope = f"model.layers.{layer}"
        found |= {f"{scope}.self_attn.{one}_proj.weight": (hidden, hidden) for one in "qkvo"}
        found |= {f"{scope}.mlp.{one}_proj.weight": (width, hidden) for one in ("gate", "up")}
        found[f"{scope}.mlp.down_proj.weight"] = (hidden, width)
        found |= {f"{scope}.{one}_layernorm.weight": (hidden,) for one in ("input", "post_attention")}
    return found


def write_checkpoint(folder: Path, sizes: Shape, layers: int, kind: str) -> tuple[Path, int]:
    """Write a checkpoint of one of ``FORMATS``; return MODEL and its bytes of weights."""
    folder.mkdir(parents=True)
    if kind == "gguf":
        return folder / "model.gguf", _write_gguf(folder / "model.gguf", sizes, layers)
    settings = {"quant_method": kind, "bits": 4, "group_size": GROUP, "version": "gemm", "sym": False}
    quantized = {} if kind == "bf16" else {"quantization_config": settings}
    numbers = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.width,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "vocab_size": sizes.vocab,
        "num_hidden_layers": layers,
    }
    (folder / "config.json").write_text(json.dumps({**_CONFIG, **quantized, **numbers}))
    Tokenizer(models.BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    return folder, _write_safetensors(folder / "model.safetensors", shapes(sizes, layers), kind)


def _write_safetensors(path: Path, weights: dict[str, tuple[int, ...]], kind: str) -> int:
    tensors = {name: stored for weight in weights.items() for name, stored in _parts(*weight, kind)}
    header, end = {}, 0
    for name, stored in tensors.items():
        begin, end = end, end + stored.size
        header[name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for stored in tensors.values():
            for piece in _repeated(stored.pattern, stored.size):
                file.write(piece)
    return end


def _parts(name: str, shape: tuple[int, ...], kind: str) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors that store one weight [out, in]."""
    if kind == "bf16" or "proj" not in name:
        yield name, Stored("BF16", shape, _BF16)
        return
    outputs, inputs = shape
    stem, groups = name.removesuffix(".weight"), inputs // GROUP
    words = (inputs // 8, outputs) if kind == "gptq" else (inputs, outputs // 8)
    yield f"{stem}.qweight", Stored("I32", words, _WORDS)
    yield f"{stem}.qzeros", Stored("I32", (groups, outputs // 8), _WORDS)
    yield f"{stem}.scales", Stored("F16", (groups, outputs), _HALVES)
    if kind == "gptq":
        order = np.arange(inputs, dtype=np.int32) // np.int32(GROUP)
        yield f"{stem}.g_idx", Stored("I32", (inputs,), order.tobytes())


def _write_gguf(path: Path, model: Shape, layers: int) -> int:
    """Write matrices in blocks of Q4_1, norms in F32."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.width)
    writer.add_head_count(model.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["a", "b", "ab", *(f"t{index}" for index in range(3, model.vocab))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    sizes: list[tuple[int, bytes]] = []
    for name, shape in shapes(model, layers).items():
        count, is_norm = math.prod(shape), len(shape) == 1
        size = 4 * count if is_norm else count // 32 * 20
        kind = gguf.GGMLQuantizationType.F32 if is_norm else gguf.GGMLQuantizationType.Q4_1
        stored = shape if is_norm else (*shape[:-1], shape[-1] // 32 * 20)
        writer.add_tensor_info(_gguf_name(name), stored, np.dtype(np.uint8 if not is_norm else np.float32),
                               size, raw_dtype=kind)  # fmt: skip
        sizes.append((size, _FLOATS if is_norm else _BLOCKS))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(bytes(-file.tell() % 32))
        for size, pattern in sizes:
            for piece in _repeated(pattern, size):
                file.write(piece)
            file.write(bytes(-size % 32))
    return sum(size for size, _ in sizes)


def _gguf_name(name: str) -> str:
    for ours, theirs in _GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _repeated(pattern: bytes, size: int) -> Iterator[bytes]:
    for begin in range(0, size, len(pattern)):
        yield pattern[: size - begin]


def _normal(dtype: npt.DTypeLike) -> npt.NDArray[np.floating]:
    return _RNG.normal(0, 0.02, _PIECE).astype(dtype)


_FLOATS = _normal(np.float32).tobytes()
_BF16 = (_normal(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
_HALVES = np.abs(_normal(np.float16)).tobytes()
_WORDS = _RNG.bytes(4 * _PIECE)
_BLOCKS = np.concatenate(
    [
        np.abs(_normal(np.float16))[: 2 * (_PIECE // 64)].reshape(-1, 2).view(np.uint8),  # scale, minimum
        _RNG.integers(0, 256, (_PIECE // 64, 16), dtype=np.uint8),
    ],
    axis=1,
).tobytes()
