"""The check of PagedAttention beside GroupQueryAttention, and what follows from it; the CPU is the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_stand_ins import PagedCudaOnCpu

from carryall.errors import ProviderUnavailableError, UsageError
from carryall.graph_opt.lower.paged_kv import block_size
from carryall.providers.base import RunnerConfig
from carryall.providers.cuda import paged_agreement
from carryall.providers.cuda.paged_agreement import STEPS, PagedAgreement
from carryall.providers.ort.slot_memory import shared_value

AUTO = {"kv_memory": "auto"}
KIND = "heads of 64 and a cache of"


@pytest.fixture(autouse=True)
def one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_agreement, "HEAD_SIZES", (64,))


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PagedCudaOnCpu:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(PagedCudaOnCpu, "_paged_complaints", {})
    return PagedCudaOnCpu()


class Spoiled:
    """A session with PagedAttention, one of whose results is wrong in one step.

    Args:
        session: the session.
        step: number of the step.
        layer: number of the attention.
    """

    def __init__(self, session: Any, step: int, layer: int) -> None:
        self.session, self.step, self.layer = session, step, layer
        self.kept: list[Any] = []  # memory of results

    def io_binding(self) -> Any:
        self.step -= 1
        binding = self.session.io_binding()
        if self.step >= 0:
            return binding
        return _SpoiledBinding(binding, self.layer, self.kept)

    def run_with_iobinding(self, binding: Any) -> None:
        self.session.run_with_iobinding(getattr(binding, "binding", binding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


class _SpoiledBinding:
    def __init__(self, binding: Any, layer: int, kept: list[Any]) -> None:
        self.binding, self.layer, self.kept = binding, layer, kept

    def get_outputs(self) -> list[Any]:
        values = list(self.binding.get_outputs())
        array = values[self.layer].numpy().copy()
        array[-1, -1] += 0.3
        self.kept.append(array)
        values[self.layer] = shared_value(array)
        return values

    def __getattr__(self, name: str) -> Any:
        return getattr(self.binding, name)


def opener(provider: PagedCudaOnCpu, change: Callable[[Any], Any]) -> Callable[[bytes], Any]:
    """Return what opens the sessions of a check, of which the first one is changed."""
    count = 0

    def opened(content: bytes) -> Any:
        nonlocal count
        count += 1
        session = provider._small_session(0, content, kernels="onnxruntime")
        return change(session) if count == 1 else session

    return opened


@pytest.mark.long
@pytest.mark.parametrize(("compute", "quantized"), [("float", ["int8"]), ("float16", ["float8e4m3fn"])])
def test_the_operators_agree(provider: PagedCudaOnCpu, compute: str, quantized: list[str]) -> None:
    """PagedAttention by its documentation, GroupQueryAttention of onnxruntime for the CPU."""
    check = PagedAgreement(compute, quantized, block_size)
    assert check.complaint(opener(provider, lambda session: session), provider.device(0)) is None


@pytest.mark.long
def test_the_operators_agree_in_all_head_sizes(
    provider: PagedCudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert paged_agreement.HEAD_SIZES == (32, 64, 96, 128, 192, 256)
    check = PagedAgreement("float", [], block_size)
    assert check.complaint(opener(provider, lambda session: session), provider.device(0)) is None


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(STEPS)))
def test_a_wrong_result_is_named(provider: PagedCudaOnCpu, number: int) -> None:
    check = PagedAgreement("float", ["int8"], block_size)
    for layer, kind in enumerate(("float", "int8")):
        opened = opener(provider, partial(Spoiled, step=number, layer=layer))
        said = check.complaint(opened, provider.device(0))
        assert said is not None
        assert said.startswith(f"PagedAttention, {list(STEPS)[number]} with {KIND} {kind}, has other results")


class _Silent:
    """A session whose kernels compute nothing."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def run(self, names: None, feeds: dict[str, Any]) -> list[Any]:
        return [np.zeros_like(array) for array in self.session.run(names, feeds)]


@pytest.mark.long
def test_operators_that_compute_nothing_do_not_agree(provider: PagedCudaOnCpu) -> None:
    check = PagedAgreement("float", [], block_size)
    session = _Silent(provider._small_session(0, check.graphs()[1], kernels="onnxruntime"))
    said = check.complaint(lambda content: session, provider.device(0))
    assert said == "GroupQueryAttention with heads of 64 computes nothing"


@pytest.mark.long
def test_agreement_is_tried_once_and_stored(
    provider: PagedCudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = counted(provider, monkeypatch)
    for _ in range(2):
        assert provider.resolve_options(RunnerConfig(options=AUTO)).options["kv_memory"] == "auto"
        assert len(opened) == 2
        provider._paged_complaints.clear()  # as in a new process
    other = RunnerConfig(options={**AUTO, "kv_cache": "fp8"})
    monkeypatch.setattr(PagedCudaOnCpu, "compute_capability", lambda self, index: (9, 0))
    provider.resolve_options(other)
    assert len(opened) == 4  # other types
    monkeypatch.setattr(PagedCudaOnCpu, "device_facts", lambda self, index: {"major": 9, "minor": 0})
    provider._paged_complaints.clear()
    provider.resolve_options(other)
    assert len(opened) == 6  # another device


@pytest.mark.long
def test_a_device_that_computes_otherwise_has_slots(
    provider: PagedCudaOnCpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = counted(provider, monkeypatch, lambda session: Spoiled(session, 1, 0))
    for _ in range(2):
        caplog.clear()
        assert provider.resolve_options(RunnerConfig(options=AUTO)).options["kv_memory"] == "slots"
        assert "KV is in slots, not in blocks, on paged-cuda-on-cpu:0: PagedAttention, pieces" in caplog.text
        provider._paged_complaints.clear()
    assert len(opened) == 2
    for asked in ("slots", "paged"):  # by name: not tried
        options = {"kv_memory": asked}
        assert provider.resolve_options(RunnerConfig(options=options)).options["kv_memory"] == asked
    assert len(opened) == 2


@pytest.mark.long
def test_a_check_that_fails_is_tried_again(
    provider: PagedCudaOnCpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patches:

        def refuse(self: PagedCudaOnCpu, index: int) -> Any:
            raise ProviderUnavailableError("the device is busy")

        patches.setattr(PagedCudaOnCpu, "device", refuse)
        for _ in range(2):  # in this process once
            assert provider.resolve_options(RunnerConfig(options=AUTO)).options["kv_memory"] == "slots"
        assert caplog.text.count("paged-cuda-on-cpu:0: the device is busy") == 2
    provider._paged_complaints.clear()
    assert provider.resolve_options(RunnerConfig(options=AUTO)).options["kv_memory"] == "auto"


def test_an_unknown_memory_is_refused(provider: PagedCudaOnCpu) -> None:
    with pytest.raises(UsageError, match=r"kv_memory.*auto, paged, slots"):
        provider.resolve_options(RunnerConfig(options={"kv_memory": "pages"}))


def counted(
    provider: PagedCudaOnCpu,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Any], Any] = lambda session: session,
) -> list[bytes]:
    """Change the sessions with PagedAttention that checks open; return a list that gets all graphs."""
    graphs, opened = list[bytes](), PagedCudaOnCpu._small_session

    def spied(self: PagedCudaOnCpu, index: int, content: bytes, kernels: str) -> Any:
        graphs.append(content)
        session = opened(self, index, content, kernels)
        return change(session) if b"PagedAttention" in content else session

    monkeypatch.setattr(PagedCudaOnCpu, "_small_session", spied)
    return graphs
