"""LoRA adapters, merged at export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny_quantized
from safetensors.numpy import load_file, save_file
from tiny_lora import RANK, merged, write_adapter
from tiny_models import write_tiny

from carryall import export
from carryall.errors import (
    CarryallError,
    CheckpointError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)
from carryall.exporter.adapter import adapter_rank, read_adapter
from carryall.exporter.package import Package

Array = npt.NDArray[Any]
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def change(tensors: dict[str, Array], module: str) -> Array:
    return (
        tensors[f"base_model.model.{module}.lora_B.weight"]
        @ tensors[f"base_model.model.{module}.lora_A.weight"]
    )


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({}, (1.5, 1.5)),
        ({"use_rslora": True}, (3.0, 3.0)),
        ({"init_lora_weights": "gaussian", "use_dora": None, "target_parameters": []}, (1.5, 1.5)),
        ({"alpha_pattern": {"q_proj": 8}}, (2.0, 1.5)),
        ({"alpha_pattern": {r"layers\.1\..*": 2}}, (1.5, 0.5)),
    ],
)
def test_weights_change_by_the_scaled_product(
    settings: dict[str, Any], scales: tuple[float, float], tmp_path: Path
) -> None:
    base = write_tiny("llama", tmp_path / "base", dtype=np.float32)
    before = load_file(base / "model.safetensors")
    tensors = write_adapter(tmp_path / "lora", {Q: (32, 32), DOWN: (32, 48)}, **settings)
    after = merged(base, tmp_path / "lora")
    for module, scale in zip((Q, DOWN), scales, strict=True):
        expected = before.pop(f"{module}.weight") + scale * change(tensors, module)
        np.testing.assert_allclose(after[f"{module}.weight"], expected, rtol=1e-6, atol=1e-6)
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor)


def test_transposed_weights_and_names_without_prefix(tmp_path: Path) -> None:
    base = write_tiny("gpt2", tmp_path / "base", dtype=np.float32)
    before = load_file(base / "model.safetensors")
    name = next(name for name in before if name.endswith("h.0.attn.c_attn.weight"))
    module = f"transformer.{name.removeprefix('transformer.').removesuffix('.weight')}"
    tensors = write_adapter(tmp_path / "lora", {module: (96, 32)}, fan_in_fan_out=True)
    expected = before[name] + 1.5 * change(tensors, module).T
    np.testing.assert_allclose(merged(base, tmp_path / "lora")[name], expected, rtol=1e-6, atol=1e-6)


def test_whole_modules_replace_weights(tmp_path: Path) -> None:
    base = write_tiny("llama", tmp_path / "base", dtype=np.float32)
    write_adapter(tmp_path / "lora", {Q: (32, 32)})
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    head = np.full((260, 32), 0.5, np.float32)
    save_file(
        {**tensors, "base_model.model.lm_head.weight": head}, tmp_path / "lora" / "adapter_model.safetensors"
    )
    np.testing.assert_array_equal(merged(base, tmp_path / "lora")["lm_head.weight"], head)


def test_an_exported_adapter_equals_the_export_of_merged_weights(tmp_path: Path) -> None:
    base = write_tiny("llama", tmp_path / "base", dtype=np.float32)
    write_adapter(tmp_path / "lora", {Q: (32, 32), DOWN: (32, 48)})
    whole = write_tiny("llama", tmp_path / "whole", dtype=np.float32)
    save_file(merged(base, tmp_path / "lora"), whole / "model.safetensors")
    found = export(base, tmp_path / "a", adapter=tmp_path / "lora").path
    expected = export(whole, tmp_path / "b").path
    assert (found / "model.onnx.data").read_bytes() == (expected / "model.onnx.data").read_bytes()
    plain = export(base, tmp_path / "c").path
    assert (found / "model.onnx.data").read_bytes() != (plain / "model.onnx.data").read_bytes()


@pytest.mark.parametrize(
    ("modules", "settings", "error", "words"),
    [
        (
            {Q: (32, 16)},
            {},
            CheckpointError,
            r"'.*q_proj' is for a weight \[32, 16\], the base model has \[32, 32\]",
        ),
        (
            {"model.layers.9.mlp.x": (8, 8)},
            {},
            CheckpointError,
            "'model.layers.9.mlp.x.weight', which the base",
        ),
        (
            {Q: (32, 32)},
            {"r": 8},
            CheckpointError,
            r"'.*q_proj' has rank 8 in .*, but its matrices are \[4, 32\]",
        ),
        ({Q: (32, 32)}, {"rank_pattern": {"q_proj": 2}}, CheckpointError, "q_proj' has rank 2"),
        ({Q: (32, 32)}, {"rank_pattern": {"(": 2}}, CheckpointError, "'\\(' is not a regular expression"),
        ({Q: (32, 32)}, {"r": "x"}, CheckpointError, "'r' must be an integer"),
        (
            {Q: (32, 32)},
            {"use_dora": True},
            UnsupportedModelError,
            "LoRA with use_dora True is not supported",
        ),
        ({Q: (32, 32)}, {"bias": "all"}, UnsupportedModelError, "LoRA with bias 'all' is not supported"),
        (
            {Q: (32, 32)},
            {"alora_invocation_tokens": [5, 6]},
            UnsupportedModelError,
            r"alora_invocation_tokens \[5, 6\] is not supported",
        ),
        (
            {Q: (32, 32)},
            {"init_lora_weights": "pissa_niter_16"},
            UnsupportedModelError,
            "init_lora_weights 'pissa_niter_16' is for a base.*path_initial_model_for_weight_conversion",
        ),
        ({Q: (32, 32)}, {"peft_type": "IA3"}, UnsupportedModelError, "type 'IA3' are not supported"),
        ({}, {}, CheckpointError, "holds no LoRA matrices"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_by_module(
    modules: dict[str, tuple[int, int]],
    settings: dict[str, Any],
    error: type[CarryallError],
    words: str,
    tmp_path: Path,
) -> None:
    base = write_tiny("llama", tmp_path / "base")
    write_adapter(tmp_path / "lora", modules, **settings)
    with pytest.raises(error, match=words):
        export(base, tmp_path / "out", adapter=tmp_path / "lora")
    assert not (tmp_path / "out").exists()


def test_incomplete_pickled_and_foreign_adapters_are_refused(tmp_path: Path) -> None:
    base = write_tiny("llama", tmp_path / "base")
    tensors = write_adapter(tmp_path / "lora", {Q: (32, 32)})
    file = tmp_path / "lora" / "adapter_model.safetensors"
    save_file({name: one for name, one in tensors.items() if "lora_A" in name}, file)
    with pytest.raises(CheckpointError, match=r"module '.*q_proj' has no matrix lora_B"):
        export(base, tmp_path / "out", adapter=tmp_path / "lora")
    file.rename(tmp_path / "lora" / "adapter_model.bin")
    with pytest.raises(ModelNotFoundError, match=r"as a pickle \(adapter_model.bin\).*save_pretrained"):
        export(base, tmp_path / "out", adapter=tmp_path / "lora")
    with pytest.raises(ModelNotFoundError, match=r"is not a LoRA adapter: it has no adapter_config\.json"):
        export(base, tmp_path / "out", adapter=base)
    with pytest.raises(UsageError, match="is not a valid file name"):
        export(base, tmp_path / "out", adapter="x" * 300)


def test_measurements_of_one_scale_are_not_taken_for_another(tmp_path: Path) -> None:
    """The record's source is the key of cached measurements."""
    base = write_tiny("llama", tmp_path / "base")
    sources = set()
    for alpha in (6, 7):
        write_adapter(tmp_path / f"lora{alpha}", {Q: (32, 32)}, lora_alpha=alpha)
        report = export(base, tmp_path / f"out{alpha}", adapter=tmp_path / f"lora{alpha}")
        sources.add(Package.open(report.path).record.source)
    assert len(sources) == 2


def test_a_quantized_base_is_refused(tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32}
    base, _ = tiny_quantized.write_quantized(tmp_path / "q", settings, tiny_quantized.awq(32))
    write_adapter(tmp_path / "lora", {Q: (64, 64)})
    with pytest.raises(UnsupportedModelError, match=r"q_proj.weight' of the base model is quantized"):
        export(base, tmp_path / "out", adapter=tmp_path / "lora")


def test_an_adapter_cannot_be_traced(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="omit via"):
        export("demo", tmp_path / "out", adapter=tmp_path, via="optimum")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of peft: deprecated names; layers that the adapter leaves out
def test_weights_equal_those_that_peft_merges(tmp_path: Path) -> None:
    """Needs torch, transformers and peft."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base = write_tiny("llama", tmp_path / "base", dtype=np.float32)
    write_adapter(
        tmp_path / "lora",
        {Q: (32, 32), DOWN: (32, 48)},
        use_rslora=True,
        target_modules=["q_proj", "down_proj"],
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    whole = peft.PeftModel.from_pretrained(model, tmp_path / "lora").merge_and_unload().state_dict()
    for name, tensor in merged(base, tmp_path / "lora").items():
        np.testing.assert_allclose(tensor, whole[name].numpy(), rtol=1e-6, atol=1e-6)


LAYERS = {"layers.0.q_proj": (32, 16), "layers.0.k_proj": (32, 8), "layers.0.v_proj": (32, 8)}


def test_an_adapter_is_read_with_its_scale(tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path / "lora", {"model.layers.0.q_proj": (16, 32)})
    found = read_adapter(tmp_path / "lora", LAYERS, 8)
    down, up = found.matrices["layers.0.q_proj"]
    np.testing.assert_array_equal(down, tensors["base_model.model.model.layers.0.q_proj.lora_A.weight"])
    b = tensors["base_model.model.model.layers.0.q_proj.lora_B.weight"]
    np.testing.assert_array_equal(up, b.T * np.float32(6 / RANK))
    assert (found.rank, list(found.matrices)) == (RANK, ["layers.0.q_proj"])
    assert adapter_rank(tmp_path / "lora") == RANK


def test_the_key_of_an_adapter_follows_its_content(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", {"layers.0.q_proj": (16, 32)})
    write_adapter(tmp_path / "same", {"layers.0.q_proj": (16, 32)})
    write_adapter(tmp_path / "scaled", {"layers.0.q_proj": (16, 32)}, lora_alpha=7)
    write_adapter(tmp_path / "other", {"layers.0.q_proj": (16, 32)}, seed=2)
    keys = [read_adapter(tmp_path / name, LAYERS, 8).key for name in ("a", "same", "scaled", "other")]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_an_adapter_of_a_fused_module_is_split(tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path / "lora", {"model.layers.0.qkv_proj": (32, 32)})
    found = read_adapter(tmp_path / "lora", LAYERS, 8).matrices
    b = tensors["base_model.model.model.layers.0.qkv_proj.lora_B.weight"].T * np.float32(6 / RANK)
    assert list(found) == list(LAYERS)
    for name, columns in zip(LAYERS, (slice(0, 16), slice(16, 24), slice(24, 32)), strict=True):
        np.testing.assert_array_equal(found[name][1], b[:, columns])


@pytest.mark.parametrize(
    ("modules", "settings", "message"),
    [
        ({"layers.0.o_proj": (16, 32)}, {}, r"changes 'layers.0.o_proj'.*\(q_proj, k_proj, v_proj\)"),
        ({"layers.0.q_proj": (17, 32)}, {}, r"module 'layers.0.q_proj' is for a weight \[17, 32\]"),
        ({"layers.0.qkv_proj": (33, 32)}, {}, r"module 'layers.0.qkv_proj' is for a weight \[33, 32\]"),
        ({"layers.0.q_proj": (16, 32)}, {"rank": 9}, "module 'layers.0.q_proj' has rank 9, more than.* 8"),
        ({"layers.0.q_proj": (16, 32)}, {"r": 3}, "module 'layers.0.q_proj' has rank 3 in adapter_config"),
        ({"layers.0.q_proj": (16, 32)}, {"use_dora": True}, "use_dora True is not supported"),
        ({"layers.0.q_proj": (16, 32)}, {"bias": "all"}, "bias 'all' is not supported"),
        ({}, {}, "holds no LoRA matrices"),
    ],
)
def test_an_adapter_that_cannot_be_kept_apart_is_refused_by_module(
    tmp_path: Path, modules: dict[str, tuple[int, int]], settings: dict[str, Any], message: str
) -> None:
    write_adapter(tmp_path / "lora", modules, **settings)
    with pytest.raises(CarryallError, match=message):
        read_adapter(tmp_path / "lora", LAYERS, 8)


def test_full_weights_and_nonfinite_values_are_refused(tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path / "lora", {"layers.0.q_proj": (16, 32)})
    file, name = (
        tmp_path / "lora" / "adapter_model.safetensors",
        "base_model.model.layers.0.q_proj.lora_A.weight",
    )
    save_file({**tensors, "base_model.model.lm_head.weight": np.zeros((4, 4), np.float32)}, file)
    with pytest.raises(UnsupportedModelError, match=r"'lm_head\.weight' is an embedding or a whole weight"):
        read_adapter(tmp_path / "lora", LAYERS, 8)
    save_file({**tensors, name: np.full_like(tensors[name], np.inf)}, file)
    with pytest.raises(CheckpointError, match=r"module 'layers\.0\.q_proj' has values that are not finite"):
        read_adapter(tmp_path / "lora", LAYERS, 8)
