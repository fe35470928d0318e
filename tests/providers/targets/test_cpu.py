"""The CPU provider: availability, options, threads, and passes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from graph_asserts import graph
from processor import needs_vnni
from slot_models import CONTEXT, save_slot_model

from carryall.errors import MissingExtraError, ProviderUnavailableError, UsageError
from carryall.providers.base import Row, RunnerConfig
from carryall.providers.host import machine
from carryall.providers.native.library import KernelLibrary
from carryall.providers.ort import ort
from carryall.providers.targets import cpu
from carryall.providers.targets.cpu import WIDE_POLICY, CpuProvider
from carryall.runtime.models.loading import load_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_slot_model(tmp_path / "model.onnx")


def test_available_or_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CpuProvider().available() is None

    def missing(what: str) -> None:
        raise MissingExtraError(what, "onnxruntime", "cpu")

    monkeypatch.setattr(ort, "load_onnxruntime", missing)
    assert "pip install 'carryall[cpu]'" in str(CpuProvider().available())


def test_one_thread_a_usable_core_unless_asked(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 3)
    for asked, expected in ((0, 3), (1, 1)):
        session = CpuProvider().session(model, RunnerConfig(num_threads=asked))
        assert session.get_session_options().intra_op_num_threads == expected


@pytest.mark.parametrize("spinning", [True, False])
def test_spinning_is_an_option(model: Path, spinning: bool) -> None:
    session = CpuProvider().session(model, RunnerConfig(options={"spinning": spinning}))
    entry = session.get_session_options().get_session_config_entry("session.intra_op.allow_spinning")
    assert entry == str(int(spinning))


def test_options_are_checked(model: Path) -> None:
    with pytest.raises(UsageError, match="provider 'cpu' has no option 'spining'; did you mean 'spinning'"):
        CpuProvider().session(model, RunnerConfig(options={"spining": True}))
    with pytest.raises(UsageError, match="spinning of provider 'cpu' must be true or false, not 'yes'"):
        CpuProvider().session(model, RunnerConfig(options={"spinning": "yes"}))


@needs_vnni
@pytest.mark.long
def test_wide_products_read_prompts_and_count_nothing_twice() -> None:
    """Prefill and wide steps run in the second graph, on the same caches as the first."""
    prompt = np.arange(40) % 90
    found = {}
    for wide in ("off", "on"):
        loaded = load_model(
            "draft", quantize="int4-fast", max_slots=20, provider_options={"wide_products": wide}
        )
        runner = loaded.runner
        prompts = [runner.forward([Row(slot, prompt, 0)])[0].copy() for slot in range(20)]
        steps = [
            runner.forward([Row(slot, prompt[:1], len(prompt)) for slot in range(count)])[0].copy()
            for count in (20, 2)
        ]
        found[wide] = np.concatenate([prompts[0], *steps])
        np.testing.assert_allclose(steps[0], steps[1], atol=0.05 * np.abs(steps[0]).max())
        runner.close()
    stored, int8 = found["off"], found["on"]
    assert 0 < np.linalg.norm(int8[:2] - stored[:2]) < 0.05 * np.linalg.norm(stored[:2])


def test_pieces_are_larger_where_products_are_wide() -> None:
    assert list(WIDE_POLICY.pieces(0, 600)) == [(0, 512), (512, 600)]


def test_wide_products_need_vnni(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = dataclasses.replace(machine.describe_machine(), features=("avx2", "fma"))
    monkeypatch.setattr(machine, "describe_machine", lambda: old)
    with pytest.raises(ProviderUnavailableError, match="wide_products needs VNNI"):
        CpuProvider().runner(model, RunnerConfig(options={"wide_products": "on"}))


PRODUCT = """g (float[1, S, 64] x) => (float[1, S, 8] y) {
    w = DequantizeLinear <axis = 0, block_size = 32> (q, s)
    y = MatMul(x, w) }"""


def resolved(config: RunnerConfig, model: ir.Model) -> RunnerConfig:
    provider = CpuProvider()
    return provider.resolve_options(config, lambda: provider.graph_facts(model))


def product(dtype: npt.DTypeLike) -> ir.Model:
    return graph(PRODUCT, q=np.zeros((64, 8)).astype(dtype), s=np.ones((2, 8), np.float32))


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(
    ("dtype", "features", "memory", "chosen"),
    [
        (ml_dtypes.int4, ("avx2", "avx512_vnni"), 10_000, "on"),
        (ml_dtypes.int4, ("avx2", "avx512_vnni"), 4_000, "off"),
        (ml_dtypes.int4, ("avx2",), 10_000, "off"),
        (np.int8, ("avx2", "avx512_vnni"), 10_000, "off"),
    ],
)
def test_wide_products_are_chosen_by_weights_cpu_and_memory(
    dtype: npt.DTypeLike,
    features: tuple[str, ...],
    memory: int,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = dataclasses.replace(machine.describe_machine(), features=features, memory_available=memory)
    monkeypatch.setattr(machine, "describe_machine", lambda: here)
    settled = resolved(RunnerConfig(), product(dtype))
    assert settled.options == {"kernels": "onnxruntime", "wide_products": chosen, "kv_memory": "slots"}
    for mode in ("on", "off"):
        asked = RunnerConfig(options={"wide_products": mode})
        assert resolved(asked, product(dtype)).options["wide_products"] == mode


def test_wide_products_has_three_modes() -> None:
    with pytest.raises(
        UsageError, match="wide_products of provider 'cpu' must be one of auto, on, off, not 'yes'"
    ):
        resolved(RunnerConfig(options={"wide_products": "yes"}), product(np.int8))


def test_lowering_needs_the_context_length() -> None:
    passes = CpuProvider().passes(RunnerConfig(context_length=CONTEXT))
    assert all(isinstance(pass_, ir.passes.PassBase) for pass_ in passes)
    with pytest.raises(UsageError, match="context_length"):
        CpuProvider().passes(RunnerConfig())


@pytest.mark.usefixtures("without_kernels")
def test_kernels_are_chosen_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def settled(**options: str) -> dict[str, str]:
        config = RunnerConfig(options=dict(options))
        return resolved(config, product(ml_dtypes.int4)).options

    with pytest.raises(ProviderUnavailableError, match="doctor --build-kernels"):
        settled(kernels="carryall")
    library = KernelLibrary(Path("kernels.so"), "avx2", ("avx2", "portable"))
    monkeypatch.setattr(cpu, "find_library", lambda: library.path)
    monkeypatch.setattr(cpu, "tuned_kernels", lambda: library)
    assert settled(wide_products="on") == {
        "kernels": "carryall",
        "wide_products": "on",
        "kv_memory": "slots",  # the graph has no attention
    }
    assert settled(kv_memory="paged")["kv_memory"] == "paged"
    assert settled(kernels="onnxruntime", wide_products="off")["kernels"] == "onnxruntime"
    vnni = dataclasses.replace(
        machine.describe_machine(), features=("avx2", "avx512_vnni"), memory_available=10_000
    )
    monkeypatch.setattr(machine, "describe_machine", lambda: vnni)
    assert settled()["wide_products"] == "off"  # one copy of the weights serves prompts too
    assert settled(kernels="onnxruntime")["wide_products"] == "on"
    slow = dataclasses.replace(library, isa="portable")
    monkeypatch.setattr(cpu, "tuned_kernels", lambda: slow)
    assert settled(wide_products="off")["kernels"] == "onnxruntime"
    assert settled(kernels="carryall")["kernels"] == "carryall"
    assert settled(kernels="carryall")["kv_memory"] == "slots"


@pytest.mark.parametrize(
    ("size", "second", "memory"), [(512, "m", "paged"), (576, "m", "slots"), (256, "n", "paged")]
)
def test_large_heads_stay_in_slots(
    monkeypatch: pytest.MonkeyPatch, size: int, second: str, memory: str
) -> None:
    library = KernelLibrary(Path("kernels.so"), "avx2", ("avx2", "portable"))
    monkeypatch.setattr(cpu, "find_library", lambda: library.path)
    monkeypatch.setattr(cpu, "tuned_kernels", lambda: library)
    cache = f"float[B, 1, P, {size}]"
    inputs = f"float[B, S, {size}] q, {cache} k, {cache} v, bool[S, T] m, bool[S, T] n"
    made = graph(f"""g ({inputs}) => (float[B, S, {size}] y) {{
            x, nk, nv = Attention <q_num_heads = 1, kv_num_heads = 1> (q, q, q, m, k, v)
            y, ok, ov = Attention <q_num_heads = 1, kv_num_heads = 1> (x, q, q, {second}, k, v)
        }}""")
    config = RunnerConfig(options={"wide_products": "off"})
    assert resolved(config, made).options["kv_memory"] == memory


@pytest.mark.parametrize("other", [{"kernels": "onnxruntime"}, {}], ids=str)
def test_paged_kv_needs_carryalls_kernels(monkeypatch: pytest.MonkeyPatch, other: dict[str, str]) -> None:
    monkeypatch.setattr(cpu, "find_library", lambda: None)
    with pytest.raises(UsageError, match="kv_memory=paged needs carryall's kernels; build them with"):
        resolved(RunnerConfig(options={"kv_memory": "paged", **other}), product(np.int8))


def test_wrong_shapes_of_constants_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """onnxruntime-genai's builder states a scalar for constants of rank 1."""
    made = graph(
        """g (float[1, 2, 3, 4] past_key_values.0.key) => (float[1, 2, N, 4] y)
        { c = Constant <value_ints = [1, 2, -1, 4]> () y = Reshape("past_key_values.0.key", c) }""".replace(
            '"', ""
        ).replace("past_key_values.0.key", "past")
    )
    made.graph.inputs[0].name = "past_key_values.0.key"
    made.graph[0].outputs[0].shape = ir.Shape([])
    assert not CpuProvider().graph_facts(made)["blocks_suffice"]
    assert not caplog.records
