"""Checkpoints of other quantizers: every weight keeps its value, in the integers that are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import tiny_quantized as tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_models import write_tiny

from carryall import LLM, SamplingParams, export, quantize
from carryall.errors import CheckpointError, UnsupportedModelError, UsageError
from carryall.exporter.export import export_model, export_package, opened
from carryall.exporter.package import Package
from carryall.exporter.quantized import awq
from carryall.exporter.quantized.levels import unpack

# https://arxiv.org/abs/2305.14314, appendix E, rounded
NF4 = np.array(
    [
        [-1.0, -0.69619, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0.0],
        [0.07958, 0.16093, 0.24611, 0.33792, 0.44071, 0.56262, 0.72296, 1.0],
    ]
).reshape(-1)


def gptq(bits: int, group: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **others}


def awq_settings(group: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", **others}


def compressed(form: str, bits: int, group: int | None) -> dict[str, Any]:
    weights = {"num_bits": bits, "group_size": group, "type": "int"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def with_blocks(form: str, *sizes: int) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(sizes)}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"weights": weights}},
    }


INTEGERS = {ir.DataType[f"{sign}INT{bits}"] for sign in ("", "U") for bits in (4, 8)}
V2 = {"checkpoint_format": "gptq_v2"}
CASES: dict[str, tuple[dict[str, Any], tiny.Quantize]] = {
    "gptq-4-32": (gptq(4, 32), tiny.gptq(4, 32)),
    "gptq-4-64-short-block": (gptq(4, 64), tiny.gptq(4, 64)),
    "gptq-4-128-wider-than-the-matrix": (gptq(4, 128), tiny.gptq(4, -1)),
    "gptq-4-column": (gptq(4, -1), tiny.gptq(4, -1)),
    "gptq-4-32-desc_act": (gptq(4, 32, desc_act=True), tiny.gptq(4, 32, desc_act=True)),
    "gptq-8-32-desc_act-v2": (gptq(8, 32, **V2), tiny.gptq(8, 32, desc_act=True, v2=True)),
    "gptq-8-32": (gptq(8, 32), tiny.gptq(8, 32)),
    "gptq-4-32-v2": (gptq(4, 32, **V2), tiny.gptq(4, 32, v2=True)),
    "gptq-4-32-symmetric": (gptq(4, 32, sym=True), tiny.gptq(4, 32, symmetric=True)),
    "gptq-4-32-symmetric-v2-unnamed": (gptq(4, 32, sym=True), tiny.gptq(4, 32, v2=True, symmetric=True)),
    "gptq-8-32-symmetric-v2-unnamed": (gptq(8, 32, sym=True), tiny.gptq(8, 32, v2=True, symmetric=True)),
    "gptq-4-32-symmetric-v1-named-v2": (gptq(4, 32, **V2), tiny.gptq(4, 32, symmetric=True)),
    "gptq-4-32-v2-in-format": (gptq(4, 32, format="gptq_v2"), tiny.gptq(4, 32, v2=True)),
    "awq-32": (awq_settings(32), tiny.awq(32)),
    "awq-64": (awq_settings(64), tiny.awq(64)),
    "awq-column": (awq_settings(-1), tiny.awq(-1)),
    "packed-4-32": (compressed("pack-quantized", 4, 32), tiny.packed(4, 32)),
    "packed-4-32-asymmetric": (compressed("pack-quantized", 4, 32), tiny.packed(4, 32, symmetric=False)),
    "packed-4-32-actorder": (compressed("pack-quantized", 4, 32), tiny.packed(4, 32, desc_act=True)),
    "packed-8-column": (compressed("pack-quantized", 8, None), tiny.packed(8, -1)),
    "int8": (compressed("int-quantized", 8, None), tiny.int8()),
    "int8-asymmetric": (compressed("int-quantized", 8, None), tiny.int8(symmetric=False)),
    "fp8-blocks": ({**FP8, "weight_block_size": [32, 16]}, tiny.fp8((32, 16))),
    "fp8-short-blocks": ({**FP8, "weight_block_size": [48, 64]}, tiny.fp8((48, 64))),
    "fp8-tensor": (FP8, tiny.fp8((1000, 1000))),
    "float-quantized": (compressed("float-quantized", 8, None), tiny.fp8(None, scale="weight_scale")),
    "float-quantized-blocks": (
        with_blocks("float-quantized", 16, 32),
        tiny.fp8((16, 32), scale="weight_scale"),
    ),
    "nvfp4": (compressed("nvfp4-pack-quantized", 4, 16), tiny.fp4(16)),
    "mxfp4": (compressed("mxfp4-pack-quantized", 4, 32), tiny.fp4(32)),
    "bitnet": ({"quant_method": "bitnet", "linear_class": "autobitlinear"}, tiny.bitnet()),
    "bitnet-bitlinear": ({"quant_method": "bitnet"}, tiny.bitnet(divides=True)),
    "bitnet-online": (
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"},
        tiny.bitnet(online=True),
    ),
    "llm.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, tiny.llm_int8()),
}


RUN = (
    *("gptq-4-64-short-block", "gptq-8-32-desc_act-v2", "awq-32", "packed-4-32-actorder", "int8-asymmetric"),
    *("fp8-short-blocks", "float-quantized", "nvfp4", "bitnet", "bitnet-online"),
)


@pytest.mark.long
@pytest.mark.parametrize("case", RUN)
def test_logits_equal_those_of_the_float_twin(case: str, tmp_path: Path) -> None:
    checkpoint, twin = tiny.write_quantized(tmp_path, *CASES[case])
    expected = tiny.logits(export_package(twin, tmp_path / "a").path)
    package = export_package(checkpoint, tmp_path / "b")
    np.testing.assert_allclose(
        tiny.logits(package.path), expected, rtol=0, atol=2e-6 * np.abs(expected).max()
    )
    assert (package.record.quantization or {})["method"] == CASES[case][0]["quant_method"]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("case", ["gptq-4-32", "awq-32", "packed-4-32", "int8"])
def test_scales_are_stored_in_the_dtype_of_the_checkpoint(case: str, dtype: Any, tmp_path: Path) -> None:
    checkpoint, _ = tiny.write_quantized(tmp_path, *CASES[case])
    tensors = load_file(checkpoint / "model.safetensors")
    suffix = next(name for name in tensors if "q_proj" in name and "scale" in name).partition("q_proj")[2]
    stored = {name: array.astype(dtype) if "scale" in name else array for name, array in tensors.items()}
    save_file(stored, checkpoint / "model.safetensors")
    package = export_package(checkpoint, tmp_path / "out").path
    parts = {str(name): value for name, value in ir.load(package / "model.onnx").graph.initializers.items()}
    found = [value for name, value in parts.items() if "q_proj" in name and ".scales" in name]
    assert {value.dtype for value in found} == {ir.DataType.from_numpy(np.dtype(dtype))}
    values = {np.float32(number) for number in np.unique(stored[f"{Q}{suffix}"])}
    assert found[0].const_value is not None
    assert {np.float32(number) for number in np.unique(found[0].const_value.numpy())} == values


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_weights_are_equal_to_the_bit_and_stay_integers(case: str, tmp_path: Path) -> None:
    checkpoint, twin = tiny.write_quantized(tmp_path, *CASES[case])
    expected = load_file(twin / "model.safetensors")
    with opened(checkpoint) as (_, tensors, _stored):
        assert tensors is not None
        assert tensors.keys() == expected.keys()
        for name, matrix in expected.items():
            np.testing.assert_array_equal(tensors[name].read(lambda array: array), matrix)
    graph = export_model(checkpoint).graph
    weights = [
        v.const_value for v in graph.initializers.values() if ".layers." in str(v.name) and v.const_value
    ]
    is_float = "fp8" in case or "float" in case
    stored = {ir.DataType.FLOAT8E4M3FN} if is_float else INTEGERS
    assert {one.dtype for one in weights if one.size >= 64 * 64} <= stored


def test_nf4_is_rounded_to_int8_and_the_error_is_recorded(tmp_path: Path) -> None:
    for nested in (False, True):
        settings_ = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        checkpoint, twin = tiny.write_quantized(
            tmp_path / str(nested), settings_, tiny.nf4(NF4, nested=nested)
        )
        expected = load_file(twin / "model.safetensors")
        with opened(checkpoint) as (_, tensors, record):
            assert tensors is not None
            assert record is not None
            for name, matrix in expected.items():
                blocks = matrix.reshape(-1, 32)
                error = np.abs(tensors[name].read(lambda array: array).reshape(-1, 32) - blocks)
                assert error.max() <= record["max_error"] * 0.3 + 1e-7  # no block exceeds 0.3
    assert record is not None
    assert record["stored_as"] == "int8"
    assert record["max_error"] == pytest.approx(np.abs(np.round(NF4 * 127) / 127 - NF4).max(), abs=1e-5)


@pytest.mark.long
def test_the_cpu_provider_runs_a_permuted_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    checkpoint, twin = tiny.write_quantized(tmp_path, *CASES["gptq-8-32-desc_act-v2"])
    prompt, params = [[5, 6, 7]], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with LLM(checkpoint, max_slots=1) as one, LLM(twin, max_slots=1) as other:
        texts = [llm.generate(prompt, params)[0].outputs[0].token_ids for llm in (one, other)]
    assert texts[0] == texts[1]


def test_gpt_oss_experts_of_mxfp4_keep_their_values(tmp_path: Path) -> None:
    sizes = {**tiny.WIDE, "head_dim": 16}
    twin = write_tiny("gpt_oss", tmp_path / "float", dtype=np.float32, **sizes)
    tensors, rng, stored = load_file(twin / "model.safetensors"), np.random.default_rng(3), {}
    for name, stack in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = stack
            continue
        count, inputs, outputs = stack.shape
        parts = [tiny.fp4(32)(rng, outputs, inputs) for _ in range(count)]
        tensors[name] = np.stack([matrix.T for _, matrix in parts])
        packed = np.stack([one["weight_packed"] for one, _ in parts])
        stored[f"{name}_blocks"] = packed.reshape(count, outputs, inputs // 32, 16)
        stored[f"{name}_scales"] = np.stack([one["weight_scale"] for one, _ in parts])
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, twin / "model.safetensors")
    checkpoint = write_tiny("gpt_oss", tmp_path / "q", quantization_config={"quant_method": "mxfp4"}, **sizes)
    save_file(stored, checkpoint / "model.safetensors")
    expected = tiny.logits(export_package(twin, tmp_path / "a").path)
    package = export_package(checkpoint, tmp_path / "b")
    np.testing.assert_allclose(
        tiny.logits(package.path), expected, rtol=0, atol=2e-6 * np.abs(expected).max()
    )


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    checkpoint, _ = tiny.write_quantized(tmp_path, *CASES["awq-32"])
    with pytest.raises(UsageError, match=r"already quantized"):
        quantize(checkpoint, tmp_path / "out")
    with pytest.raises(UsageError, match=r"already quantized \(awq\)"):
        export(checkpoint, tmp_path / "out", quantize="int4-fast")
    assert not (tmp_path / "out").exists()


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("gptq-4-32", {"qzeros": None}, "no tensor '.*q_proj.qzeros'"),
        ("gptq-4-32", {"qweight": None}, "has '.*q_proj.qzeros', but no 'qweight' beside it"),
        ("gptq-4-32", {"weight": np.zeros((64, 64), np.float32)}, "both '.*qweight' and '.*q_proj.weight'"),
        ("gptq-4-32", {"scales": np.ones((3, 64), np.float16)}, r"q_proj.scales': expected shape \[2, 64\]"),
        ("gptq-4-32", {"g_idx": np.zeros(64, np.int32)}, "g_idx': its groups do not have 32 inputs each"),
        ("gptq-4-32", {"g_idx": np.full(64, -1, np.int32)}, "g_idx': its groups do not have 32 inputs each"),
        ("gptq-4-32", {"g_idx": np.full(64, 2**31 - 1, np.int32)}, "groups do not have 32 inputs each"),
        ("gptq-4-32", {"qweight": np.zeros(8, np.int32)}, r"expected a matrix, found shape \[8\]"),
        ("awq-32", {"scales": None}, "no tensor '.*q_proj.scales'"),
        (
            "awq-32",
            {"qzeros": np.ones((2, 7), np.int32)},
            r"qzeros': expected shape \[2, 8\], found \[2, 7\]",
        ),
        ("packed-4-32", {"weight_scale": None}, "no tensor '.*q_proj.weight_scale'"),
        ("packed-4-32", {"weight_shape": np.array([64, 9])}, r"states the shape \[64, 9\]"),
        ("packed-4-32", {"weight_scale": np.ones((64, 5), np.float16)}, "has 5 groups for 64 inputs"),
        ("mxfp4", {"weight_scale": np.ones((64, 3), np.uint8)}, r"weight_scale': expected shape \[64, 2\]"),
        ("bitnet", {"weight": None}, "no tensor '.*q_proj.weight'"),
        ("bitnet", {"weight": np.zeros((16, 64), np.float32)}, "has dtype F32, but ternary weights are U8"),
        ("bitnet", {"weight_scale": np.ones(3, np.float32)}, r"weight_scale': expected shape \[1\] or \[\]"),
        ("llm.int8", {"SCB": np.ones(3, np.float32)}, r"SCB': expected shape \[64\], found \[3\]"),
    ],
)
def test_damaged_checkpoints_are_refused_by_tensor(
    case: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    checkpoint, _ = tiny.write_quantized(tmp_path, *CASES[case])
    tensors = load_file(checkpoint / "model.safetensors")
    for suffix, value in changes.items():
        tensors.pop(f"{Q}.{suffix}", None)
        if value is not None:
            tensors[f"{Q}.{suffix}"] = value
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        export_package(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_llm_int8_in_the_order_of_a_gpu_is_refused(tmp_path: Path) -> None:
    checkpoint, _ = tiny.write_quantized(tmp_path, *CASES["llm.int8"])
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[f"{Q}.weight_format"] = np.array(1, np.uint8)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.weight' .* is not stored by rows"):
        export_package(checkpoint, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"quant_method": "aqlm"},
            UnsupportedModelError,
            "quantized by 'aqlm' are not supported; supported: awq",
        ),
        ({"bits": 3}, CheckpointError, "'bits' of quantization_config must be an integer of 4, 8, found 3"),
        (
            {"group_size": "x"},
            CheckpointError,
            "'group_size' of quantization_config must be an integer, found 'x'",
        ),
        (
            {"checkpoint_format": "marlin"},
            UnsupportedModelError,
            "checkpoint_format 'marlin' is not supported",
        ),
        (
            {"sym": True},
            CheckpointError,
            r"qzeros' stores zero points from 0 to 14, but config.json says sym",
        ),
        ({"is_marlin_format": True}, UnsupportedModelError, "packed for Marlin"),
        ({"pack_dtype": "int64"}, UnsupportedModelError, "into other words than int32"),
        ({"quant_method": "awq", "version": "gemv"}, UnsupportedModelError, "AWQ version 'gemv'"),
        ({"quant_method": "awq", "zero_point": False}, UnsupportedModelError, "AWQ weights without zero"),
        ({"quant_method": "awq", "backend": "llm-awq"}, UnsupportedModelError, "packed by llm-awq"),
        ({"quant_method": "compressed-tensors"}, CheckpointError, "'config_groups'"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {},
                "transform_config": {"config_groups": {"u": {"apply": [{"location": "input"}]}}},
            },
            UnsupportedModelError,
            r"transforms activations \(input\)",
        ),
        ({"quant_method": "fp8", "weight_block_size": [8]}, CheckpointError, "'weight_block_size'"),
        ({"quant_method": "bitnet"}, CheckpointError, "quantized by bitnet, but none is"),
        ({"quant_method": "bitnet", "linear_class": "x"}, UnsupportedModelError, "linear_class 'x'"),
        ({"quant_method": "bitnet", "use_rms_norm": True}, UnsupportedModelError, "norms of their own"),
        ({"quant_method": "bitsandbytes"}, CheckpointError, "quantized by bitsandbytes, but none is"),
        ({"quant_method": ["gptq"]}, UnsupportedModelError, r"quantized by \['gptq'\] are not supported"),
    ],
)
def test_settings_that_are_not_supported_are_named(
    changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    checkpoint, _ = tiny.write_quantized(tmp_path, *CASES["gptq-4-32"])
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] |= changes
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=words):
        export_package(checkpoint, tmp_path / "out")


@pytest.mark.parametrize("settings_", ["gptq", [1], 3])
def test_settings_must_be_an_object(settings_: Any, tmp_path: Path) -> None:
    checkpoint, _ = tiny.write_quantized(tmp_path, *CASES["gptq-4-32"])
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"quantization_config": settings_}))
    with pytest.raises(CheckpointError, match="'quantization_config' must be an object, found"):
        export_package(checkpoint, tmp_path / "out")


def test_a_group_size_of_another_type_is_refused(tmp_path: Path) -> None:
    settings_, quantize_ = CASES["packed-4-32"]
    weights = {"num_bits": 4, "group_size": [32], "type": "int"}
    changed = {**settings_, "config_groups": {"group_0": {"weights": weights}}}
    checkpoint, _ = tiny.write_quantized(tmp_path, changed, quantize_)
    with pytest.raises(CheckpointError, match=r"no group_size of quantization_config gives \(none\)"):
        export_package(checkpoint, tmp_path / "out")


def test_scales_of_other_blocks_than_the_stated_ones_are_refused(tmp_path: Path) -> None:
    settings_ = {**FP8, "weight_block_size": [32, 32]}
    checkpoint, _ = tiny.write_quantized(tmp_path, settings_, tiny.fp8((32, 16)))
    with pytest.raises(
        CheckpointError, match=r"weight_scale_inv': its shape \[2, 6\] does not fit a weight of 64 x 96"
    ):
        export_package(checkpoint, tmp_path / "out")


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([4, 8]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_unpacking_inverts_packing(bits: int, rows: int, words: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 2**bits, (rows, words * 32 // bits))
    packed = tiny.pack_rows(numbers, bits)
    np.testing.assert_array_equal(unpack(packed, bits, axis=1), numbers)
    np.testing.assert_array_equal(unpack(packed.T, bits, axis=0), numbers.T)
    if bits == 4:
        interleaved = tiny.pack_rows(numbers, 4, (0, 2, 4, 6, 1, 3, 5, 7))
        np.testing.assert_array_equal(awq._unpack(interleaved), numbers)


def test_the_package_opens(tmp_path: Path) -> None:
    checkpoint, _ = tiny.write_quantized(tmp_path, *CASES["awq-32"])
    record = Package.open(export_package(checkpoint, tmp_path / "out").path).record
    assert record.quantization == {"method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
