"""Towers lowered to the CPU's kernels compute what ``vision.onnx`` says."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file, save_file
from tiny_vlms import VISION_CONFIG, write_vlm
from tower_feeds import feeds_of
from vision_golden import picture

import carryall
from carryall import LLM, SamplingParams
from carryall.contract import GROUPS, IMAGE_STATES
from carryall.errors import ProviderRuntimeError, UsageError
from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.lower.attention.patch_rows import PatchRowsPass
from carryall.graph_opt.lower.kernels import CPU
from carryall.graph_opt.lower.older_opset import OlderOpsetPass
from carryall.graph_opt.lower.pipelines.towers import TowerForm, tower_passes
from carryall.graph_opt.passes.remove_unused import RemoveUnusedNodesPass
from carryall.graph_opt.passes.shape_inference import ShapeInferencePass
from carryall.graph_opt.pipeline.pipeline import run
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
from carryall.providers.native.library import find_library, splits_floats
from carryall.providers.targets.cpu import CpuProvider
from carryall.runtime.models.sight import open_tower
from carryall.runtime.models.tower_graph import tower_graph
from carryall.runtime.models.tower_rows import TowerRows

WIDE = {**VISION_CONFIG, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
needs_kernels = pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")


def resolved(**options: Any) -> RunnerConfig:
    return get_provider("cpu").resolve_options(RunnerConfig(options=options))


def lowered(package: Path, **options: Any) -> Path:
    return tower_graph(package / "vision.onnx", get_provider("cpu"), resolved(**options))


def operators(model: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(model, load_external_data=False).graph.node)


def states(model: Path, feeds: Any) -> Any:
    return get_provider("cpu").session(model, resolved()).run([IMAGE_STATES], feeds)[0]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tower")
    vision = {"model_type": "smolvlm_vision", **WIDE}
    checkpoint = write_vlm(folder / "checkpoint", vision_config=vision)
    weights = load_file(checkpoint / "model.safetensors")
    # of the size that trained layers have: with larger ones, the softmax amplifies each rounding
    matrices = {name: each / (0.4 * len(each[0]) ** 0.5) for name, each in weights.items() if each.ndim == 2}
    save_file({**weights, **matrices}, checkpoint / "model.safetensors")
    carryall.export(checkpoint, folder / "package")
    return folder / "package"


# Layers with windows, whose groups are shorter at the edges of a picture, keep their mask.
@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "kept"), [("smolvlm", 0), ("qwen2_vl", 0), ("qwen2_5_vl", 2), ("gemma4", 0), ("internvl", 0)]
)
def test_states_are_those_of_the_portable_graph(family: str, kept: int, tmp_path: Path) -> None:
    carryall.export(write_vlm(tmp_path / "checkpoint", family), tmp_path / "package")
    model, portable = lowered(tmp_path / "package"), tmp_path / "package" / "vision.onnx"
    there, before = operators(model), operators(portable)
    assert there["Attention"] == kept
    assert there["MultiHeadAttention"] == before["Attention"] - kept > 0
    runs = feeds_of(tmp_path / "package")
    assert len(runs) >= 2
    for feeds in runs:
        np.testing.assert_allclose(states(model, feeds), states(portable, feeds), rtol=1e-4, atol=1e-5)


@pytest.mark.long
@needs_kernels
@pytest.mark.parametrize(
    "family",
    ["smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "internvl", "llava", "glm_ocr"],
)
def test_attention_over_rows_of_patches_computes_the_portable_graph(family: str, tmp_path: Path) -> None:
    carryall.export(write_vlm(tmp_path / "checkpoint", family), tmp_path / "package")
    model, portable = tmp_path / "rows.onnx", tmp_path / "package" / "vision.onnx"
    attention = PatchRowsPass("float32")
    result, _ = run(
        load_model(portable),
        [ShapeInferencePass(), attention, RemoveUnusedNodesPass(), OlderOpsetPass(CPU.opset)],
    )
    save_model(result, model)
    assert operators(model)["PagedAttention"] == attention.fired == operators(portable)["Attention"] > 0
    rows = TowerRows(get_provider("cpu").session(model, resolved()))
    runs = feeds_of(tmp_path / "package")
    assert len(runs) >= 2
    for feeds in runs:
        np.testing.assert_allclose(
            states(model, rows.feeds(feeds)), states(portable, feeds), rtol=1e-4, atol=3e-5
        )


@needs_kernels
def test_int8_multiplies_all_weights_in_8_bits(wide: Path) -> None:
    model, portable = lowered(wide, tower="int8"), wide / "vision.onnx"
    # The layers, and the products in front of them and behind.
    assert operators(model)["Chain"] == 1
    assert operators(model)["MatMul"] == operators(model)["MultiHeadAttention"] == 0
    encoder = open_tower(wide, get_provider("cpu").session(model, resolved()))
    for feeds in feeds_of(wide):
        found, expected = encoder._run(feeds), states(portable, feeds)
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 1e-3 < error < 0.02


def halved(package: Path, folder: Path) -> Path:
    """Write the package's ``vision.onnx`` with weights that bfloat16 holds."""
    graph = load_model(package / "vision.onnx")
    for value in graph.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT:
            words = np.ascontiguousarray(tensor.numpy()).view(np.uint32) & np.uint32(0xFFFF0000)
            value.const_value = ir.tensor(words.view(np.float32), name=value.name)
    folder.mkdir()
    save_model(graph, folder / "vision.onnx")
    return folder


@needs_kernels
@pytest.mark.parametrize("split", [False, True])
def test_bfloat16_has_half_of_the_bytes_and_rounds_activations_on_amx_alone(
    split: bool, wide: Path, tmp_path: Path
) -> None:
    package = halved(wide, tmp_path / "halves")
    portable = package / "vision.onnx"
    provider, size = CpuProvider(), dict[str, int]()
    forms: tuple[TowerForm, ...] = ("float32", "bfloat16")
    for form in forms:
        kernels = provider.kernels_for(provider.checked_options({"kernels": "carryall"}))
        passes = tower_passes(dataclasses.replace(kernels, split_floats=split), form)
        result, _ = run(load_model(portable), passes)
        (tmp_path / form).mkdir()
        save_model(result, tmp_path / form / "model.onnx")
        size[form] = sum(each.stat().st_size for each in (tmp_path / form).iterdir())
    model = tmp_path / "bfloat16" / "model.onnx"
    assert operators(model)["Chain"] == 1
    assert operators(model)["MatMul"] == operators(model)["MultiHeadAttention"] == 0
    assert 0.45 < size["bfloat16"] / size["float32"] < 0.6
    encoder = open_tower(wide, provider.session(model, resolved()))
    for feeds in feeds_of(wide):
        found, expected = encoder._run(feeds), states(portable, feeds)
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        # Of keys and values in 8 bits of mantissa, of queries where AMX multiplies them, and of rows where it
        # multiplies these.
        assert 1e-5 < error < (4e-3 if split and splits_floats() else 2e-3)


@needs_kernels
def test_weights_that_16_bits_do_not_hold_stay_whole(wide: Path) -> None:
    model, portable = lowered(wide, tower="bfloat16"), wide / "vision.onnx"
    assert operators(model)["Chain"] == 1
    encoder = open_tower(wide, get_provider("cpu").session(model, resolved()))
    for feeds in feeds_of(wide):
        found, expected = encoder._run(feeds), states(portable, feeds)
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 1e-5 < error < 2e-3


@pytest.mark.long
@needs_kernels
@pytest.mark.parametrize(
    "family",
    ["smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "internvl", "llava", "glm_ocr"],
)
def test_bfloat16_reads_every_family(family: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    carryall.export(write_vlm(tmp_path / "checkpoint", family), package)
    model = lowered(package, tower="bfloat16")
    assert operators(model)["MultiHeadAttention"] == operators(model)["Attention"] == 0
    encoder = open_tower(package, get_provider("cpu").session(model, resolved()))
    for feeds in feeds_of(package):
        found, expected = encoder._run(feeds), states(package / "vision.onnx", feeds)
        assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.05


@needs_kernels
def test_groups_that_are_not_made_of_windows_are_refused(tmp_path: Path) -> None:
    carryall.export(write_vlm(tmp_path / "checkpoint", "qwen2_5_vl"), tmp_path / "package")
    model = lowered(tmp_path / "package", tower="int8")
    encoder = open_tower(tmp_path / "package", get_provider("cpu").session(model, resolved()))
    feeds = feeds_of(tmp_path / "package")[0]
    assert np.isfinite(encoder._run(feeds)).all()
    with pytest.raises(ProviderRuntimeError, match="do not lie one behind the other"):
        encoder._run({**feeds, GROUPS: feeds[GROUPS].reshape(-1, 2).T})


@needs_kernels
@pytest.mark.parametrize(("quantized", "kernels", "form", "split"), [
    (True, "carryall", "int8", "int8 split"),
    (False, "carryall", "float32", "auto split"),
    (True, "onnxruntime", "float32", "float32"),
])  # fmt: skip
def test_the_tower_of_a_quantized_decoder_has_8_bits(
    quantized: bool, kernels: str, form: str, split: str
) -> None:
    """Without a quantized decoder the weights decide where AMX multiplies bfloat16."""
    config = resolved(kernels=kernels)
    expected = split if splits_floats() else form
    assert get_provider("cpu").tower_form(config, quantized=quantized) == expected
    stated = resolved(kernels=kernels, tower="float32")
    assert get_provider("cpu").tower_form(stated, quantized=quantized) == "float32"


@needs_kernels
def test_a_tower_of_bfloat16_weights_multiplies_these_on_amx(wide: Path, tmp_path: Path) -> None:
    """One that bfloat16 does not hold stays float32, and so do all where bfloat16 is not faster."""
    halves = halved(wide, tmp_path / "halves")
    assert operators(lowered(wide)) == operators(lowered(wide, tower="float32"))
    multiplied = "bfloat16" if splits_floats() else "float32"
    assert operators(lowered(halves)) == operators(lowered(halves, tower=multiplied))
    assert operators(lowered(halves))["Chain"] == (1 if splits_floats() else 0)


@needs_kernels
def test_the_option_reaches_the_tower_of_a_model(wide: Path) -> None:
    talk = [
        {"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "?"}]}
    ]

    def seen(**options: Any) -> Any:
        with LLM(wide, provider="cpu", max_slots=1, provider_options=options) as llm:
            llm.chat(talk, GREEDY)
            images = llm.render_chat(talk).images
            assert images is not None
            return images.states

    exact, rounded, again = seen(tower="auto"), seen(tower="int8"), seen(tower="float32")
    np.testing.assert_array_equal(exact, again)
    assert 1e-3 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < 0.02


@pytest.mark.parametrize("form", ["int8", "bfloat16"])
def test_forms_of_carryall_without_kernels_are_refused(form: str, wide: Path) -> None:
    with pytest.raises(UsageError, match=f"tower={form} needs carryall's kernels"):
        LLM(wide, provider="cpu", provider_options={"tower": form, "kernels": "onnxruntime"})


def test_a_run_with_units_of_different_shapes_is_refused(wide: Path) -> None:
    feeds = feeds_of(wide)[0]
    feeds[GROUPS] = np.where(feeds[GROUPS] == feeds[GROUPS][-1, -1], -1, feeds[GROUPS])
    encoder = open_tower(wide, get_provider("cpu").session(lowered(wide), resolved()))
    with pytest.raises(ProviderRuntimeError, match="different shapes"):
        encoder._run(feeds)
