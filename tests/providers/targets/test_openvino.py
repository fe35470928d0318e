"""OpenVINO against the cpu provider on every family; options, devices, exhaustion, sessions, the demo."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from processor import needs_vnni
from tiny_models import write_tiny

from carryall import LLM, SamplingParams
from carryall.errors import GraphError, ProviderRuntimeError, ProviderUnavailableError, UsageError
from carryall.exporter.export import export_package
from carryall.exporter.package import Package
from carryall.graph_opt.compare.runners import PortableRunner
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.lower.outputs.hidden_states import LastHiddenStatePass
from carryall.graph_opt.lower.pipelines.paged import paged_passes
from carryall.graph_opt.lower.products.weight_only_products import WeightOnlyProductsPass
from carryall.graph_opt.passes.base import GraphPass
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.calibration.calibrators import min_max
from carryall.graph_opt.quantize.formats.dynamic_int8 import DynamicQuantizationPass
from carryall.graph_opt.quantize.formats.kv_cache import QuantizeKVPass
from carryall.graph_opt.quantize.formats.static_int8 import StaticQuantizationPass
from carryall.graph_opt.quantize.recipe import QuantizationRecipe
from carryall.graph_opt.quantize.search.ranges import input_histograms
from carryall.providers import get_provider
from carryall.providers.base import Row, Runner, RunnerConfig
from carryall.providers.runners.paged_runner import PagedRunner

pytest.importorskip("openvino")
from carryall.providers.openvino.model import open_core, own_precision

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma3_text", "gpt2"]
CONTEXT, SLOTS = 64, 4
Open = Callable[..., Runner]


def tokens(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 256, count)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))


def package(family: str, folder: Path) -> Package:
    return export_package(write_tiny(family, folder / "checkpoint"), folder / "package")


@pytest.fixture
def open_runner(tmp_path: Path) -> Iterator[Open]:
    """Lower a model for a provider and open it; by default the tiny llama on openvino."""
    opened: list[Runner] = []

    def opener(provider: str = "openvino", model: ir.Model | None = None, **options: object) -> Runner:
        folder = tmp_path / f"runner{len(opened)}"
        folder.mkdir()
        config = RunnerConfig(max_slots=SLOTS, context_length=CONTEXT, num_threads=1, options=options)
        target = get_provider(provider)
        model = model or package("llama", folder).load()
        save_model(run(model, target.passes(config))[0], folder / "model.onnx")
        opened.append(target.runner(folder / "model.onnx", config))
        return opened[-1]

    yield opener
    for runner in opened:
        runner.close()


def all_logits(runner: Runner, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    logits = runner.forward([Row(0, ids, 0, num_logits=len(ids))])[0].copy()
    runner.release(0)
    return logits


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_cpu_provider(family: str, open_runner: Open, tmp_path: Path) -> None:
    made, ids = package(family, tmp_path), tokens(40)
    expected = all_logits(open_runner("cpu", made.load()), ids)
    runner = open_runner("openvino", made.load())
    np.testing.assert_allclose(all_logits(runner, ids), expected, atol=1e-3)
    runner.forward([Row(1, ids[:33], 0, 0), Row(2, ids[:5], 0, 0)])
    mixed = runner.forward([Row(1, ids[33:34], 33), Row(2, ids[5:39], 5, 34)])
    np.testing.assert_allclose(mixed[0], expected[33:34], atol=1e-3)
    np.testing.assert_allclose(mixed[1], expected[5:39], atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    ["llama", "gemma3_text", *[pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES[1:6]]],
)
def test_graphs_without_hidden_states_compute_wanted_rows_alone(family: str, tmp_path: Path) -> None:
    made, ids = package(family, tmp_path), tokens(40)
    logits: list[npt.NDArray[np.float32]] = []
    for passes in ([LastHiddenStatePass(), *paged_passes(CONTEXT)], paged_passes(CONTEXT)):
        save_model(run(made.load(), passes)[0], tmp_path / f"{len(logits)}.onnx")
        config = RunnerConfig(max_slots=SLOTS, context_length=CONTEXT, num_threads=1)
        runner = get_provider("openvino").runner(tmp_path / f"{len(logits)}.onnx", config)
        runner.forward([Row(1, ids[:33], 0, 0)])
        logits.append(np.concatenate(runner.forward([Row(1, ids[33:34], 33), Row(2, ids[:24], 0, 3)])))
        runner.close()
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"inference_precision": "bf16"}], ids=["f32", "bf16"])
def test_softcapped_models_keep_explicit_kv(
    options: dict[str, object], open_runner: Open, tmp_path: Path
) -> None:
    folder = write_tiny(
        "gemma3_text", tmp_path / "checkpoint", attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    )
    made, ids = export_package(folder, tmp_path / "package"), tokens(40)
    expected = all_logits(open_runner("cpu", made.load()), ids)
    runner = open_runner("openvino", made.load(), **options)
    close = functools.partial(np.testing.assert_allclose, atol=0.1 if options else 1e-3)
    close(all_logits(runner, ids), expected)
    runner.forward([Row(1, ids[:33], 0, 0), Row(2, ids[:5], 0, 0)])
    mixed = runner.forward([Row(1, ids[33:34], 33), Row(2, ids[5:39], 5, 34)])
    close(mixed[0], expected[33:34])
    close(mixed[1], expected[5:39])
    runner.copy_prefix(2, 0, 30)
    close(runner.forward([Row(0, ids[30:35], 30, 2)])[0], expected[33:35])
    close(runner.forward([Row(2, ids[20:22], 20, 2)])[0], expected[20:22])


@pytest.mark.long
@pytest.mark.parametrize("method", ["int4-fast", "int8-fast"])
def test_compressed_weights_give_the_portable_graphs_logits(
    method: str, open_runner: Open, tmp_path: Path
) -> None:
    folder = write_tiny("qwen2", tmp_path / "checkpoint", hidden_size=64, intermediate_size=64)
    made, ids = export_package(folder, tmp_path / "package"), tokens(12)
    model, _ = run(made.load(), QuantizationRecipe(method, 32).passes()[0])
    save_model(model, tmp_path / "quantized.onnx")
    exact = {"dynamic_quantization_group": 0}
    session = get_provider("openvino").session(tmp_path / "quantized.onnx", RunnerConfig(options=exact))
    feeds = {"input_ids": ids[None], "attention_mask": np.ones((1, 12), np.int64)}
    feeds["position_ids"] = np.arange(12)[None]
    past = np.zeros((1, 2, 0, 16), np.float32)
    kv = {value.name: past for value in model.graph.inputs if "past" in str(value.name)}
    (expected,) = session.run(["logits"], feeds | kv)
    runner = open_runner("openvino", ir.load(tmp_path / "quantized.onnx"), **exact)
    np.testing.assert_allclose(all_logits(runner, ids), expected[0], atol=1e-3)


@pytest.mark.parametrize("length", [32, 40])
def test_a_copied_prefix_is_independent_of_its_source(length: int, open_runner: Open) -> None:
    runner, ids, other = open_runner(), tokens(50), tokens(50, 1)
    expected = all_logits(runner, ids)
    assert runner.kv_bytes == 0
    runner.forward([Row(0, ids, 0)])
    block = 32 * runner.info.kv_bytes_per_token
    assert runner.kv_bytes == 2 * block
    runner.copy_prefix(0, 1, length)
    assert runner.kv_bytes == 2 * block
    runner.forward([Row(0, other[length - 3 : 50], length - 3)])
    (got,) = runner.forward([Row(1, ids[length:], length, 50 - length)])
    np.testing.assert_allclose(got, expected[length:], atol=1e-3)
    assert runner.kv_bytes == (4 if length == 32 else 3) * block
    assert isinstance(runner, PagedRunner)
    runner.check_integrity()


def test_a_small_pool_says_how_much_it_holds(open_runner: Open) -> None:
    whole = open_runner()
    assert whole.info.kv_tokens is None
    block = whole.info.kv_bytes_per_token * 32
    slots = whole.info.max_slots
    runner = open_runner(kv_cache_bytes=(slots + 2) * block)
    assert runner.info.kv_tokens == 2 * 32
    for slot in range(slots):  # the worst case: as many blocks as can be partly empty
        runner.forward([Row(slot, tokens(1), 0)])
    runner.forward([Row(0, tokens(64 - slots), 1)])


def test_an_exhausted_pool_harms_no_other_row(open_runner: Open) -> None:
    block = open_runner().info.kv_bytes_per_token * 32
    runner, ids = open_runner(kv_cache_bytes=2 * block), tokens(40)
    expected = all_logits(runner, ids)
    runner.forward([Row(0, ids[:30], 0)])
    with pytest.raises(ProviderRuntimeError, match="exhausted"):
        runner.forward([Row(0, ids[30:], 30), Row(1, ids[:1], 0)])
    np.testing.assert_allclose(runner.forward([Row(0, ids[30:], 30, 10)])[0], expected[30:], atol=1e-3)


@needs_vnni  # OpenVINO computes in floats without it
@pytest.mark.long
def test_activations_are_rounded_in_groups_of_the_weights_blocks(open_runner: Open, tmp_path: Path) -> None:
    folder = write_tiny("qwen2", tmp_path / "checkpoint", hidden_size=64, intermediate_size=64)
    model = export_package(folder, tmp_path / "package").load()
    save_model(
        run(model, QuantizationRecipe("int4-fast", 64, symmetric=True).passes()[0])[0], tmp_path / "int4.onnx"
    )

    def logits(**options: object) -> npt.NDArray[np.float32]:
        return all_logits(open_runner(model=ir.load(tmp_path / "int4.onnx"), **options), tokens(12))

    chosen = logits()
    np.testing.assert_array_equal(chosen, logits(dynamic_quantization_group=64))
    for other in (0, 32):
        assert not np.array_equal(chosen, logits(dynamic_quantization_group=other))
    with pytest.raises(UsageError, match="dynamic_quantization_group"):
        logits(dynamic_quantization_group="all")


def test_a_cache_has_the_precision_that_the_device_chooses(open_runner: Open) -> None:
    own = own_precision(open_core("CPU"), "CPU")
    layout = open_runner(inference_precision="auto").info.kv_layout
    assert layout == open_runner(inference_precision=own).info.kv_layout


def test_an_absent_device_is_an_error_that_lists_the_present_ones(open_runner: Open) -> None:
    with pytest.raises(ProviderUnavailableError, match=r"GPU\.7.*CPU"):
        open_runner(device="GPU.7")


def test_an_unknown_option_is_an_error_that_lists_the_known_ones(open_runner: Open) -> None:
    with pytest.raises(UsageError, match=r"speed.*kv_cache_precision"):
        open_runner(speed=11)


def test_a_portable_graph_is_no_paged_one(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="not lowered to a paged cache"):
        get_provider("openvino").runner(package("llama", tmp_path).model_path, RunnerConfig())


def test_u8_cache_is_close_and_smaller_and_prompts_in_pieces_are_whole(open_runner: Open) -> None:
    ids, options = tokens(40), {"dynamic_quantization_group": 0}
    exact, small = open_runner(**options), open_runner(kv_cache="int8", **options)
    assert small.info.kv_bytes_per_token < exact.info.kv_bytes_per_token
    whole = all_logits(small, ids)
    assert 0 < np.abs(whole - all_logits(exact, ids)).mean() < 0.05
    pieces = [small.forward([Row(0, ids[a:b], a, b - a)])[0].copy() for a, b in pairwise((0, 5, 36, 37, 40))]
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-3)


@pytest.mark.long
def test_a_model_calibrated_for_an_8_bit_cache_gets_one(open_runner: Open, tmp_path: Path) -> None:
    made, ids = package("llama", tmp_path), tokens(40)
    names = [f"past_key_values.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")]
    scales = {name: np.full(16, 0.05, np.float32) for name in names}
    model, _ = run(made.load(), [QuantizeKVPass(scales)])
    save_model(model, tmp_path / "kv.onnx")
    expected = all_logits(open_runner(), ids)
    runner = open_runner("openvino", ir.load(tmp_path / "kv.onnx"))
    assert np.abs(all_logits(runner, ids) - expected).mean() < 0.05
    wide = open_runner("openvino", ir.load(tmp_path / "kv.onnx"), kv_cache="float32")
    assert runner.info.kv_bytes_per_token < wide.info.kv_bytes_per_token
    np.testing.assert_allclose(all_logits(wide, ids), expected, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("method", ["int8-dynamic", "int8-static"])
def test_integer_products_become_weight_only(method: str, open_runner: Open, tmp_path: Path) -> None:
    """The weights are unchanged; OpenVINO quantizes activations itself, or not at all as here."""
    made, ids = package("llama", tmp_path), tokens(12)
    form = BlockFormat(bits=8, block_size=16)
    if method == "int8-static":
        windows = [tokens(40, seed) for seed in range(4)]
        histograms = input_histograms(made.model_path, windows, context_length=CONTEXT)
        quantize: GraphPass = StaticQuantizationPass(form, {n: min_max(h) for n, h in histograms.items()})
    else:
        quantize = DynamicQuantizationPass(form)
    save_model(run(made.load(), [quantize])[0], tmp_path / "int8.onnx")
    weights, _ = run(ir.load(tmp_path / "int8.onnx"), [WeightOnlyProductsPass()])
    save_model(weights, tmp_path / "weights.onnx")
    expected = PortableRunner(tmp_path / "weights.onnx").forward({0: ids})[0]
    runner = open_runner(model=ir.load(tmp_path / "int8.onnx"), dynamic_quantization_group=0)
    np.testing.assert_allclose(all_logits(runner, ids), expected, atol=1e-3)


@pytest.mark.long
def test_llm_gives_the_tokens_of_the_cpu_provider(tmp_path: Path) -> None:
    made = package("qwen3", tmp_path)
    prompts = ["hello there", "a", "one two three four five six seven"]
    params = SamplingParams(temperature=0, max_tokens=12)
    results = []
    for provider in ("cpu", "openvino"):
        with LLM(made.path, provider=provider, max_slots=2) as llm:
            results.append([result.outputs[0].token_ids for result in llm.generate(prompts, params)])
    assert results[0] == results[1]


SIGNALLED = """
import gc, signal, sys
from pathlib import Path
from carryall.providers.openvino.model import compile_model, open_core, read
signal.signal(signal.SIGTERM, lambda number, frame: print("caught"))
compiled = []
for _ in range(2):
    core = open_core("CPU")
    compiled.append(compile_model(core, read(core, Path(sys.argv[1])), "CPU", {}))
    del core
while compiled:
    del compiled[0]
    gc.collect()
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="alternate signal stacks are Linux's")
def test_a_signal_finds_its_stack_after_models_were_closed(tmp_path: Path) -> None:
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    )
    ir.save(model, tmp_path / "model.onnx")
    command = [sys.executable, "-X", "faulthandler", "-c", SIGNALLED, str(tmp_path / "model.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "caught\n"), done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "body",
    [
        'a = com.example.Unknown (x) b = Neg (a) y = Clip (b, "", most)',
        "a = MaxPool <kernel_shape = [2], ceil_mode = 1> (x) y = Clip (a)",  # a window wider than the input
    ],
)
def test_a_graph_that_would_end_the_process_is_refused(body: str, tmp_path: Path) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 18, "com.example": 1]>
        g (float[4, 4, 1] x) => (float[a, b, c] y) <float most = {{1.5}}> {{ {body} }}"""
    ir.save(ir.from_onnx_text(text), tmp_path / "model.onnx")
    with pytest.raises(GraphError, match="does not convert, and its result reaches a Clip without one"):
        get_provider("openvino").session(tmp_path / "model.onnx")


@pytest.mark.long
def test_a_clip_with_one_bound_of_a_known_input_is_computed(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 18]>
        g (float[3] x) => (float[3] y) <float most = {1.5}> { y = Clip (x, "", most) }"""
    ir.save(ir.from_onnx_text(text), tmp_path / "model.onnx")
    x = np.array([-3, 1, 2], np.float32)
    session = get_provider("openvino").session(tmp_path / "model.onnx")
    assert session.run(None, {"x": x})[0].tolist() == [-3, 1, 1.5]


@pytest.mark.slow
def test_the_demo_speaks_on_openvino() -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM("demo", provider="openvino", max_slots=2) as llm:
        one, two = llm.generate(["def f(x):", "import os"], params)
    assert one.outputs[0].text.strip()
    assert two.outputs[0].text.strip()
