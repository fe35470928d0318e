"""Folders of CTranslate2: equal to the checkpoint that they were made of, and damaged ones."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file
from tiny_whisper import CONFIG, GENERATION, tensors, write_whisper

from carryall.errors import CarryallError, CheckpointError, ModelNotFoundError, UnsupportedModelError
from carryall.exporter.ctranslate2 import is_ctranslate2, write_checkpoint
from carryall.runtime.api.load_encoder import encoder_folder
from carryall.runtime.models.find import find_model

Array = npt.NDArray[Any]
SEED = 5
_CODES = {"float32": 0, "int8": 1, "int16": 2, "float16": 4}
_PARTS = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "ffn/layer_norm": ("final_layer_norm",),
}


def variables(weights: Mapping[str, Array], key_bias: float = 0.0) -> dict[str, Array]:
    """Return the variables of CTranslate2's specification for the tensors of a checkpoint."""
    found: dict[str, Array] = {"decoder/scale_embeddings": np.array(0, np.int8)}
    for part in ("encoder", "decoder"):
        found[f"{part}/num_heads"] = np.array(CONFIG[f"{part}_attention_heads"], np.int16)
        found[f"{part}/position_encodings/encodings"] = weights[f"model.{part}.embed_positions.weight"]
        for kind, name in (("gamma", "weight"), ("beta", "bias")):
            found[f"{part}/layer_norm/{kind}"] = weights[f"model.{part}.layer_norm.{name}"]
        for layer in range(CONFIG[f"{part}_layers"]):
            for target, modules in _PARTS.items():
                prefix = f"model.{part}.layers.{layer}"
                if f"{prefix}.{modules[0]}.weight" not in weights:
                    continue
                names = ("gamma", "beta") if target.endswith("norm") else ("weight", "bias")
                for kind, name in zip(names, ("weight", "bias"), strict=True):
                    pieces = [
                        weights.get(
                            f"{prefix}.{module}.{name}", np.full(CONFIG["d_model"], key_bias, np.float32)
                        )
                        for module in modules
                    ]
                    found[f"{part}/layer_{layer}/{target}/{kind}"] = np.concatenate(pieces)
    for conv in ("conv1", "conv2"):
        for name in ("weight", "bias"):
            found[f"encoder/{conv}/{name}"] = weights[f"model.encoder.{conv}.{name}"]
    found["decoder/embeddings/weight"] = weights["model.decoder.embed_tokens.weight"]
    return found


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def model_bin(content: Mapping[str, Array], spec: str = "WhisperSpec") -> bytes:
    parts = [struct.pack("<I", 6), text(spec), struct.pack("<II", 3, len(content))]
    for name, array in content.items():
        parts += [text(name), struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)]
        parts += [struct.pack("<BI", _CODES[array.dtype.name], array.nbytes), array.tobytes()]
    aliases = {"decoder/projection/weight": "decoder/embeddings/weight"}
    parts.append(struct.pack("<I", len(aliases)))
    return b"".join([*parts, *(text(other) + text(name) for other, name in aliases.items())])


def write_folder(folder: Path, content: Mapping[str, Array]) -> Path:
    """Write a folder as CTranslate2's converter does."""
    write_whisper(folder, SEED)
    for name in ("model.safetensors", "generation_config.json", "preprocessor_config.json"):
        (folder / name).unlink()
    (folder / "model.bin").write_bytes(model_bin(content))
    settings = {
        "suppress_ids": GENERATION["suppress_tokens"],
        "suppress_ids_begin": GENERATION["begin_suppress_tokens"],
        "alignment_heads": [[0, 1]],
        "lang_ids": [258, 259, 260],
    }
    (folder / "config.json").write_text(json.dumps(settings))
    features = {
        "feature_size": 16,
        "sampling_rate": 16000,
        "hop_length": 160,
        "chunk_length": 2,
        "n_fft": 400,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(features))
    return folder


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_folder_has_the_tensors_of_its_checkpoint(tmp_path: Path, dtype: npt.DTypeLike) -> None:
    weights = {name: values.astype(dtype) for name, values in tensors(CONFIG, SEED).items()}
    halves = {
        name: each.astype(dtype) if each.dtype == np.float32 else each
        for name, each in variables(weights).items()
    }
    source, target = write_folder(tmp_path / "source", halves), tmp_path / "target"
    target.mkdir()
    write_checkpoint(source, target)
    found = load_file(target / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], values)
    config = json.loads((target / "config.json").read_text())
    assert {name: config[name] for name in CONFIG if name in config} == {
        name: value for name, value in CONFIG.items() if name in config
    }
    generation = json.loads((target / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == GENERATION["suppress_tokens"]
    assert generation["begin_suppress_tokens"] == GENERATION["begin_suppress_tokens"]


def test_levels_of_8_bits_have_a_scale_for_each_row(tmp_path: Path) -> None:
    content = variables(tensors(CONFIG, SEED))
    name = "decoder/layer_0/ffn/linear_0/weight"
    scales = (127 / np.abs(content[name]).max(axis=1)).astype(np.float32)
    levels = np.round(content[name] * scales[:, None]).astype(np.int8)
    content |= {name: levels, f"{name}_scale": scales}
    target = tmp_path / "target"
    target.mkdir()
    write_checkpoint(write_folder(tmp_path / "source", content), target)
    found = load_file(target / "model.safetensors")["model.decoder.layers.0.fc1.weight"]
    np.testing.assert_allclose(found, levels / scales[:, None], rtol=1e-6)
    del content[f"{name}_scale"]
    with pytest.raises(UnsupportedModelError, match="has the type int8; supported: floats, and int8 with"):
        write_checkpoint(write_folder(tmp_path / "other", content), target)


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "whisper-tiny", variables(tensors(CONFIG, SEED)))
    assert encoder_folder(source) is None  # which serve and batch jobs ask first
    found = find_model(str(source))
    assert found.name == "whisper-tiny"
    assert (found / "model.safetensors").is_file()
    assert find_model(source) == found


def test_damaged_files_are_refused_with_their_name(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", variables(tensors(CONFIG, SEED)))
    whole, target = (source / "model.bin").read_bytes(), tmp_path / "target"
    target.mkdir()
    for size in [*range(20, 400, 13), len(whole) // 2, len(whole) - 1]:
        (source / "model.bin").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.bin"):
            write_checkpoint(source, target)
    random = np.random.default_rng(0)
    for _ in range(40):
        changed = bytearray(whole)
        changed[int(random.integers(18, 600))] ^= int(random.integers(1, 256))
        (source / "model.bin").write_bytes(changed)
        with contextlib.suppress(CarryallError):  # no error of another kind
            write_checkpoint(source, target)


def test_other_models_of_ctranslate2_are_no_whisper(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", {})
    (source / "model.bin").write_bytes(model_bin({}, "TransformerSpec"))
    assert not is_ctranslate2(source)
    with pytest.raises(ModelNotFoundError, match="pickle"):
        find_model(source)


def test_what_whisper_lacks_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    source = write_folder(tmp_path / "source", variables(tensors(CONFIG, SEED), key_bias=1.0))
    with pytest.raises(UnsupportedModelError, match="biases of keys"):
        write_checkpoint(source, target)
    whole = write_folder(tmp_path / "whole", variables(tensors(CONFIG, SEED)))
    (whole / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        write_checkpoint(whole, target)
    layers = {
        name: each for name, each in variables(tensors(CONFIG, SEED)).items() if "encoder/layer" not in name
    }
    with pytest.raises(CheckpointError, match="no whole Whisper"):
        write_checkpoint(write_folder(tmp_path / "part", layers), target)
