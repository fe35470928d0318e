"""Folders of CTranslate2 with a Whisper, as faster-whisper publishes them, as a Hugging Face checkpoint.

The format of ``model.bin``, little-endian: version, name and revision of the specification, and a list of
variables, each a name, a shape, a type and its content; then further names of variables. Source: CTranslate2
4, src/models/model.cc and python/ctranslate2/specs/model_spec.py.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError, UnsupportedModelError
from ..storage.stored_tensor import Array
from ..storage.writing import save_tensors, writing
from .config import CONFIG_FILE, GENERATION_FILE, read_json
from .image_processor import PREPROCESSOR_FILE

WEIGHTS_FILE = "model.bin"
_VERSION, _SPEC = 6, "WhisperSpec"
_TYPES: Mapping[int, npt.DTypeLike] = {
    0: np.float32,
    1: np.int8,
    2: np.int16,
    3: np.int32,
    4: np.float16,
    5: ml_dtypes.bfloat16,
}
_MOST_VARIABLES, _MOST_AXES = 100_000, 4
_LAYER = re.compile(r"(encoder|decoder)/layer_(\d+)/(.+)")
# By the end of a name, the module of a layer; several for the parts of one product.
_MODULES: Mapping[str, tuple[str, ...]] = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
_KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
_OTHERS = {
    "position_encodings/encodings": "embed_positions.weight",
    "embeddings/weight": "embed_tokens.weight",
}


def is_ctranslate2(folder: Path) -> bool:
    """Return whether a folder holds a Whisper of CTranslate2."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        return False
    start = struct.pack("<IH", _VERSION, len(_SPEC) + 1) + _SPEC.encode()
    with path.open("rb") as file:
        return file.read(len(start)) == start


def write_checkpoint(source: Path, target: Path) -> None:
    """Write a folder of CTranslate2 as a checkpoint of the family ``whisper``.

    Args:
        source: the folder.
        target: an existing folder.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedModelError: its weights have a form that is not supported.
        OSError: a file cannot be written.
    """
    variables = dict(_variables(source / WEIGHTS_FILE))
    config = read_json(source / CONFIG_FILE)
    tensors = dict(_tensors(variables, source))
    sizes = _sizes(variables, tensors, source)
    tokenizer = source / "tokenizer.json"
    if not tokenizer.is_file():
        raise CheckpointError(
            f"{source} holds no tokenizer.json; copy that of the same size of Whisper into it"
        )
    specials = {each["content"]: each["id"] for each in read_json(tokenizer).get("added_tokens", [])}
    if not {"<|endoftext|>", "<|startoftranscript|>"} <= set(specials):
        raise CheckpointError(f"{tokenizer} has no special tokens of Whisper")
    end, start = specials["<|endoftext|>"], specials["<|startoftranscript|>"]
    generation = {
        "eos_token_id": end,
        "decoder_start_token_id": start,
        "is_multilingual": sizes["vocab_size"] >= 51_865,
        "suppress_tokens": config.get("suppress_ids", []),
        "begin_suppress_tokens": config.get("suppress_ids_begin", []),
        "alignment_heads": config.get("alignment_heads", []),
    }
    preprocessor = source / PREPROCESSOR_FILE
    features = read_json(preprocessor) if preprocessor.is_file() else {"feature_size": sizes["num_mel_bins"]}
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    contents = {
        CONFIG_FILE: {"model_type": "whisper", **sizes, **ids},
        GENERATION_FILE: generation,
        PREPROCESSOR_FILE: {"feature_extractor_type": "WhisperFeatureExtractor", **features},
    }
    for name, content in contents.items():
        with writing(target / name):
            (target / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    with writing(target / tokenizer.name):
        shutil.copyfile(tokenizer, target / tokenizer.name)
    save_tensors(tensors, target / "model.safetensors", {"format": "pt"})


def _variables(path: Path) -> Iterator[tuple[str, Array]]:
    """Yield the variables of a file by name, and those with further names."""
    found: dict[str, Array] = {}
    try:
        reader = _Reader(path)
        reader.number("I")
        reader.text()
        reader.number("I")
        for _ in range(_checked(reader.number("I"), _MOST_VARIABLES)):
            name, axes = reader.text(), _checked(reader.number("B"), _MOST_AXES)
            shape = [reader.number("I") for _ in range(axes)]
            dtype = np.dtype(_TYPES[reader.number("B")])
            content = reader.take(reader.number("I"))
            found[name] = content.view(dtype).reshape(shape)
        for _ in range(_checked(reader.number("I"), _MOST_VARIABLES)):
            other, name = reader.text(), reader.text()
            found[other] = found[name]
    except (struct.error, ValueError, KeyError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    yield from found.items()


class _Reader:
    """Reads a file, mapped into memory, from its beginning on."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, np.uint8, "r")
        self._place = 0

    def take(self, count: int) -> npt.NDArray[np.uint8]:
        """Return the next bytes."""
        part = self._bytes[self._place : self._place + count]
        if len(part) < count:
            raise ValueError(f"it ends at byte {len(self._bytes)}, within its content")
        self._place += count
        return np.asarray(part)

    def number(self, kind: str) -> int:
        """Return the next number, of a type of ``struct``."""
        return int(struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")).tobytes())[0])

    def text(self) -> str:
        """Return the next text, which ends with a zero."""
        return self.take(self.number("H")).tobytes().rstrip(b"\0").decode()


def _checked(count: int, most: int) -> int:
    if count > most:
        raise ValueError(f"a count of {count} exceeds {most}")
    return count


def _tensors(variables: Mapping[str, Array], source: Path) -> Iterator[tuple[str, Array]]:
    """Yield the tensors under their names in a checkpoint."""
    for name, stored in variables.items():
        stem, _, kind = name.rpartition("/")
        layer = _LAYER.fullmatch(stem)
        part = stem.partition("/")[0]
        if layer is not None and layer[3] in _MODULES and kind in _KINDS:
            prefix, modules = f"model.{layer[1]}.layers.{layer[2]}", _MODULES[layer[3]]
            array = _floats(variables, name, stored)
            pieces = np.split(array, len(modules)) if len(modules) > 1 else [array]
            for module, piece in zip(modules, pieces, strict=True):
                if kind == "bias" and module.endswith("k_proj"):
                    if np.any(piece):
                        raise UnsupportedModelError(
                            f"{source}: '{name}' has biases of keys, which Whisper lacks"
                        )
                    continue
                yield f"{prefix}.{module}.{_KINDS[kind]}", np.ascontiguousarray(piece)
        elif part in ("encoder", "decoder") and name.removeprefix(f"{part}/") in _OTHERS:
            yield f"model.{part}.{_OTHERS[name.removeprefix(f'{part}/')]}", _floats(variables, name, stored)
        elif (
            stem in ("encoder/conv1", "encoder/conv2", "encoder/layer_norm", "decoder/layer_norm")
            and kind in _KINDS
        ):
            yield f"model.{stem.replace('/', '.')}.{_KINDS[kind]}", _floats(variables, name, stored)


def _floats(variables: Mapping[str, Array], name: str, stored: Array) -> Array:
    """Return a tensor in its own floats; levels of 8 bits, with a scale for each row, in float32."""
    if stored.dtype.kind == "f" or stored.dtype == ml_dtypes.bfloat16:
        return stored
    scales = variables.get(f"{name}_scale")
    if stored.dtype != np.int8 or scales is None:
        raise UnsupportedModelError(
            f"'{name}' has the type {stored.dtype}; supported: floats, and int8 with scales"
        )
    column = np.asarray(scales, np.float32).reshape(-1, *[1] * (stored.ndim - 1))
    return stored.astype(np.float32) / column


def _sizes(variables: Mapping[str, Array], tensors: Mapping[str, Array], source: Path) -> dict[str, Any]:
    """Return the sizes of config.json, from the shapes."""
    try:
        counts = {
            part: 1
            + max(int(match[2]) for match in map(_LAYER.match, variables) if match and match[1] == part)
            for part in ("encoder", "decoder")
        }
        vocab_size, width = tensors["model.decoder.embed_tokens.weight"].shape
        sizes: dict[str, Any] = {
            "vocab_size": vocab_size,
            "d_model": width,
            "num_mel_bins": tensors["model.encoder.conv1.weight"].shape[1],
            "max_source_positions": len(tensors["model.encoder.embed_positions.weight"]),
            "max_target_positions": len(tensors["model.decoder.embed_positions.weight"]),
            "scale_embedding": bool(variables["decoder/scale_embeddings"]),
        }
        for part, layers in counts.items():
            sizes[f"{part}_layers"] = layers
            sizes[f"{part}_attention_heads"] = int(variables[f"{part}/num_heads"])
            sizes[f"{part}_ffn_dim"] = tensors[f"model.{part}.layers.0.fc1.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{source / WEIGHTS_FILE} is no whole Whisper: {error!r} is missing") from error
    return sizes
