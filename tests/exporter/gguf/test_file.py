"""Models exported from GGUF compute what the same weights compute from safetensors."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest
from safetensors.numpy import save_file
from tiny_gguf import embedding, write_gguf
from tiny_models import write_tiny

from carryall.errors import CheckpointError, UnsupportedModelError, WeightWarning
from carryall.exporter.export import export_package
from carryall.exporter.gguf.config import config_of
from carryall.exporter.gguf.file import GgufFile, GgufTensor

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": None}
TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def logits(package: Path, length: int = 7) -> npt.NDArray[np.float32]:
    options = ort.SessionOptions()
    # Optimized, onnxruntime multiplies int4 weights with activations of 8 bits.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(package / "model.onnx", options, providers=["CPUExecutionProvider"])
    feeds = {
        "input_ids": np.random.default_rng(1).integers(0, 256, (2, length)),
        "attention_mask": np.ones((2, length), np.int64),
        "position_ids": np.tile(np.arange(length), (2, 1)),
    }
    for entry in session.get_inputs():
        if entry.name not in feeds:
            feeds[entry.name] = np.zeros((2, entry.shape[1], 0, entry.shape[3]), np.float32)
    result: npt.NDArray[np.float32] = session.run(["logits"], feeds)[0]
    return result


def stored_sizes(package: Path) -> Counter[str]:
    """Return the bytes of a package's initializers by dtype."""
    sizes: Counter[str] = Counter()
    for value in ir.load(package / "model.onnx").graph.initializers.values():
        assert value.const_value is not None
        sizes[value.const_value.dtype.name] += value.const_value.nbytes
    return sizes


def compare(tmp_path: Path, model_type: str, types: Any = "F32", **overrides: Any) -> None:
    """Export from both formats and compare the logits."""
    extra = overrides.pop("extra", None)
    held = write_gguf(model_type, tmp_path / "m.gguf", types=types, extra=extra, **overrides)
    reference = write_tiny(model_type, tmp_path / "reference", **overrides)
    tensors = {name: np.ascontiguousarray(array) for name, array in held.items()}
    save_file(tensors, reference / "model.safetensors")
    expected = logits(export_package(reference, tmp_path / "expected").path)
    found = logits(export_package(tmp_path / "m.gguf", tmp_path / "found").path)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("smollm3", {"no_rope_layers": None}),
        ("gemma2", {"query_pre_attn_scalar": 8}),
        ("qwen3_moe", {"mlp_only_layers": []}),
        ("gemma3_text", {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 8}),
    ],
)
def test_every_architecture(tmp_path: Path, model_type: str, overrides: dict[str, Any]) -> None:
    compare(tmp_path, model_type, **overrides)


@pytest.mark.parametrize("types", ["F32", {"experts": "MXFP4", "proj": "Q8_0"}])
def test_gpt_oss_with_experts_of_mxfp4(tmp_path: Path, types: Any) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "truncate": False}
    rope = {"rope_parameters": {**yarn, "original_max_position_embeddings": 16}}
    # llama.cpp has these two as constants of the architecture.
    compare(tmp_path, "gpt_oss", types, **{**WIDE, "head_dim": 16}, **rope, swiglu_limit=7.0)


def test_rope_factors_are_tensors(tmp_path: Path) -> None:
    factors = {"rope_factors_short.weight": [1.0, 1.2], "rope_factors_long.weight": [1.5, 3.0]}
    extra = {name: np.array(values, np.float32) for name, values in factors.items()}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.2],
        "long_factor": [1.5, 3.0],
        "attention_factor": 1.0,
    }
    compare(tmp_path, "phi3", extra=extra, rope_parameters=rope)


@pytest.mark.long
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_type_keeps_its_numbers(tmp_path: Path, kind: str, tied: bool) -> None:
    compare(tmp_path, "llama", kind, tie_word_embeddings=tied, **WIDE)


def test_weights_stay_as_small_as_they_were(tmp_path: Path) -> None:
    held = write_gguf("llama", tmp_path / "m.gguf", types="Q4_0", **WIDE)
    package = export_package(tmp_path / "m.gguf", tmp_path / "out")
    sizes = stored_sizes(package.path)
    matrices = sum(matrix.size for matrix in held.values() if matrix.ndim == 2)
    assert sizes["INT4"] + sizes["FLOAT16"] == matrices // 32 * 18  # bytes of a block of Q4_0
    assert package.record.quantization == {"method": "gguf", "types": ["Q4_0"]}


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_scales_and_minima_are_stored_in_16_bits(tmp_path: Path, kind: str) -> None:
    held = write_gguf("llama", tmp_path / "m.gguf", types=kind, **WIDE)
    sizes = stored_sizes(export_package(tmp_path / "m.gguf", tmp_path / "out").path)
    blocks = sum(matrix.size for matrix in held.values() if matrix.ndim == 2) // 32
    assert sizes["FLOAT16"] == blocks * 2 * (2 if kind.endswith("_1") else 1)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_blocks_without_finite_scales_are_warned_of(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types=kind, hidden_size=64, intermediate_size=96)
    name = "model.layers.0.mlp.down_proj.weight"
    tensor = GgufFile(path).tensors[name]
    assert isinstance(tensor, GgufTensor)
    content = bytearray(path.read_bytes())
    content[tensor._info.begin : tensor._info.begin + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(content)
    assert not np.isfinite(GgufFile(path).tensors[name].read(lambda array: array)).all()
    with pytest.warns(WeightWarning, match=rf"tensor '{re.escape(name)}' holds NaN or infinity"):
        export_package(path, tmp_path / "package")


@pytest.mark.parametrize(("kind", "stored"), [("Q4_1", "UINT4"), ("Q5_1", "UINT8")])
def test_types_with_minima_store_no_zero_points(tmp_path: Path, kind: str, stored: str) -> None:
    held = write_gguf("llama", tmp_path / "m.gguf", types=kind, **WIDE)
    sizes = stored_sizes(export_package(tmp_path / "m.gguf", tmp_path / "out").path)
    levels = sum(matrix.size for matrix in held.values() if matrix.ndim == 2)
    assert sizes[stored] == (levels // 2 if stored == "UINT4" else levels)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_linear(key: str) -> None:
    metadata = {"general.architecture": "llama", f"llama.{key}": 4.0}
    config = config_of(metadata, embedding(8))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_shards_are_found_from_any_of_them(tmp_path: Path) -> None:
    held = write_gguf("llama", tmp_path / "m.gguf", split=5)
    paths = sorted(tmp_path.glob("*.gguf"))
    assert len(paths) > 2
    for path in paths:
        assert set(GgufFile(path).tensors) == set(held)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=f"shard {paths[1].name} is missing"):
        GgufFile(paths[0])


def test_the_tokenizer_and_its_template_come_along(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_gguf("llama", tmp_path / "m.gguf")
    folder = export_package(tmp_path / "m.gguf", tmp_path / "out").path
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode("the é</s>")
    assert encoded.tokens == ["th", "e", "Ġ", "Ã", "©", "</s>"]
    assert tokenizer.decode(encoded.ids) == "the é"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
    assert "message.role" in settings["chat_template"]
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 256,
        "eos_token_id": [257],
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "clip"}, "the vision tower of a model alone; give the file of its decoder"),
        ({"general.architecture": "rwkv6"}, "architecture 'rwkv6' are not supported; these are: apertus"),
        ({"general.architecture": "qwen3", "qwen3.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.value_length": 4}, "heads of 8 for keys and 4 for values"),
    ],
)
def test_unsupported_files_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from carryall.exporter.gguf import file, header

    write_gguf("llama", tmp_path / "m.gguf")
    original = header.read_header

    def changed(data: memoryview, path: Path, size: int) -> header.Header:
        found = original(data, path, size)
        return header.Header({**found.metadata, **changes}, found.tensors)

    monkeypatch.setattr(file, "read_header", changed)
    with pytest.raises(UnsupportedModelError, match=message):
        _ = GgufFile(tmp_path / "m.gguf").config
    with pytest.raises(UnsupportedModelError, match=message):
        export_package(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "part", "overrides"),
    [
        ("llama", b"attn_q.weight", {}),
        ("qwen3_moe", b"ffn_up_exps.weight", {"mlp_only_layers": []}),
    ],
)
def test_a_tensor_in_two_shards_is_refused(
    tmp_path: Path, family: str, part: bytes, overrides: dict[str, Any]
) -> None:
    write_gguf(family, tmp_path / "m.gguf", split=2, **overrides)
    paths = sorted(tmp_path.glob("*.gguf"))
    again, moved = b"blk.0." + part, b"blk.1." + part
    owner = next(path for path in paths if again in path.read_bytes())
    other = next(path for path in paths if path != owner and moved in path.read_bytes())
    other.write_bytes(other.read_bytes().replace(moved, again))
    with pytest.raises(CheckpointError, match=rf"{part.decode()}' occurs twice"):
        GgufFile(paths[0])


def test_a_shard_without_the_name_of_one_is_refused(tmp_path: Path) -> None:
    write_gguf("llama", tmp_path / "m.gguf", split=5)
    paths = sorted(tmp_path.glob("*.gguf"))
    paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(
        CheckpointError, match=rf"is one of {len(paths)} shards, whose names end in -00001-of-"
    ):
        GgufFile(tmp_path / "model.gguf")
