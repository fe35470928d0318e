"""The CPU provider: availability, options, threads, and passes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx_ir as ir
import pytest
from slot_models import CONTEXT, save_slot_model

from carryall.errors import MissingExtraError, ProviderUnavailableError, UsageError
from carryall.providers.base import RunnerConfig
from carryall.providers.host import machine
from carryall.providers.native.library import KernelLibrary
from carryall.providers.ort import ort
from carryall.providers.runners.explicit_runner import ExplicitRunner
from carryall.providers.targets import cpu
from carryall.providers.targets.cpu import CpuProvider
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


@pytest.mark.parametrize("own", [True, False])
def test_threads_spin_briefly_between_runs_of_own_kernels(own: bool) -> None:
    options = {"spinning": True, "kernels": "carryall" if own else "onnxruntime"}
    assert ("session.intra_op.spin_duration_us" in CpuProvider().session_entries(options)) is own


def test_options_are_checked(model: Path) -> None:
    with pytest.raises(UsageError, match="provider 'cpu' has no option 'spining'; did you mean 'spinning'"):
        CpuProvider().session(model, RunnerConfig(options={"spining": True}))
    with pytest.raises(UsageError, match="spinning of provider 'cpu' must be true or false, not 'yes'"):
        CpuProvider().session(model, RunnerConfig(options={"spinning": "yes"}))


def settled(**options: str) -> dict[str, str]:
    return CpuProvider().resolve_options(RunnerConfig(options=dict(options))).options


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("wide_products", "on", "auto, off"), ("kv_memory", "slots", "auto, paged, explicit")],
)
def test_what_older_versions_could_choose_is_refused(name: str, value: str, allowed: str) -> None:
    with pytest.raises(UsageError, match=f"{name} of provider 'cpu' must be one of {allowed}, not '{value}'"):
        settled(**{name: value})


def test_one_graph_serves_prompts_and_decoding() -> None:
    assert settled(wide_products="off") == settled() | {"wide_products": "off"}


def test_lowering_needs_the_context_length() -> None:
    passes = CpuProvider().passes(RunnerConfig(context_length=CONTEXT))
    assert all(isinstance(pass_, ir.passes.PassBase) for pass_ in passes)
    with pytest.raises(UsageError, match="context_length"):
        CpuProvider().passes(RunnerConfig())


@pytest.mark.usefixtures("without_kernels")
def test_kernels_are_chosen_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProviderUnavailableError, match="doctor --build-kernels"):
        settled(kernels="carryall")
    assert settled() == {"kernels": "onnxruntime", "kv_memory": "explicit"}
    library = KernelLibrary(Path("kernels.so"), "avx2", ("avx2", "portable"))
    monkeypatch.setattr(cpu, "find_library", lambda: library.path)
    monkeypatch.setattr(cpu, "tuned_kernels", lambda: library)
    assert settled() == {"kernels": "carryall", "kv_memory": "paged"}
    assert settled(kv_memory="explicit") == {"kernels": "carryall", "kv_memory": "explicit"}
    assert settled(kernels="onnxruntime") == {"kernels": "onnxruntime", "kv_memory": "explicit"}
    slow = dataclasses.replace(library, isa="portable")
    monkeypatch.setattr(cpu, "tuned_kernels", lambda: slow)
    assert settled()["kernels"] == "onnxruntime"
    assert settled(kernels="carryall") == {"kernels": "carryall", "kv_memory": "paged"}


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_sequences_run_one_by_one_and_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_model("draft", max_slots=2)
    assert isinstance(loaded.runner, ExplicitRunner)
    (record,) = [record for record in caplog.records if "one by one" in record.getMessage()]
    assert "carryall's CPU kernels are not in use" in record.getMessage()
    loaded.close()


@pytest.mark.parametrize("other", [{"kernels": "onnxruntime"}, {}], ids=str)
def test_paged_kv_needs_carryalls_kernels(monkeypatch: pytest.MonkeyPatch, other: dict[str, str]) -> None:
    monkeypatch.setattr(cpu, "find_library", lambda: None)
    with pytest.raises(UsageError, match="kv_memory=paged needs carryall's kernels; build them with"):
        settled(kv_memory="paged", **other)
