"""The CPU provider: availability, options, threads, and the passes it asks for."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from slot_models import CONTEXT, save_slot_model

from carryall.providers import machine, ort
from carryall.providers.base import RunnerConfig
from carryall.providers.cpu import CpuProvider
from carryall.runtime.errors import MissingExtraError, UsageError


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


def test_lowering_needs_the_context_length() -> None:
    passes = CpuProvider().passes(RunnerConfig(context_length=CONTEXT))
    assert all(isinstance(pass_, ir.passes.PassBase) for pass_ in passes)
    with pytest.raises(UsageError, match="context_length"):
        CpuProvider().passes(RunnerConfig())
