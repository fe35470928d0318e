"""The CPU provider: availability, options, threads, and the passes it asks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from slot_models import CONTEXT, save_slot_model

from carryall.providers import machine, ort
from carryall.providers.base import Row, RunnerConfig
from carryall.providers.cpu import WIDE_POLICY, CpuProvider
from carryall.runtime.errors import MissingExtraError, ProviderUnavailableError, UsageError
from carryall.runtime.loading import load_model


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
    with pytest.raises(UsageError, match="provider 'cpu' has no option 'spining'; it has: spinning"):
        CpuProvider().session(model, RunnerConfig(options={"spining": True}))
    with pytest.raises(UsageError, match="option 'spinning' of provider 'cpu' is a bool, not 'yes'"):
        CpuProvider().session(model, RunnerConfig(options={"spinning": "yes"}))


def test_wide_products_read_prompts_and_count_nothing_twice() -> None:
    """Prompts and wide steps run in the second graph, on the same caches as the first."""
    prompt = np.arange(40) % 90
    found = {}
    for wide in (False, True):
        loaded = load_model("draft", quantize="int4", max_slots=20, provider_options={"wide_products": wide})
        runner = loaded.runner
        prompts = [runner.forward([Row(slot, prompt, 0)])[0].copy() for slot in range(20)]
        steps = [
            runner.forward([Row(slot, prompt[:1], len(prompt)) for slot in range(count)])[0].copy()
            for count in (20, 2)
        ]
        found[wide] = np.concatenate([prompts[0], *steps])
        np.testing.assert_allclose(steps[0], steps[1], atol=0.05 * np.abs(steps[0]).max())
        runner.close()
    stored, int8 = found[False], found[True]
    assert 0 < np.linalg.norm(int8[:2] - stored[:2]) < 0.05 * np.linalg.norm(stored[:2])


def test_pieces_are_larger_where_products_are_wide() -> None:
    assert list(WIDE_POLICY.pieces(0, 300)) == [(0, 256), (256, 300)]


def test_wide_products_need_vnni(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = dataclasses.replace(machine.describe_machine(), features=("avx2", "fma"))
    monkeypatch.setattr(machine, "describe_machine", lambda: old)
    with pytest.raises(ProviderUnavailableError, match="wide_products needs VNNI"):
        CpuProvider().runner(model, RunnerConfig(options={"wide_products": True}))


def test_lowering_needs_the_context_length() -> None:
    passes = CpuProvider().passes(RunnerConfig(context_length=CONTEXT))
    assert all(isinstance(pass_, ir.passes.PassBase) for pass_ in passes)
    with pytest.raises(UsageError, match="context_length"):
        CpuProvider().passes(RunnerConfig())
