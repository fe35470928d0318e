"""provider="auto" measures the providers, stores the fastest, and says why others cannot run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import graph

from carryall.errors import ProviderRuntimeError, ProviderUnavailableError
from carryall.providers.base import Provider, Row, Runner, RunnerConfig
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.models.fastest import fastest_provider
from carryall.runtime.models.loading import load_model
from carryall.runtime.models.model_source import SourceModel

CONFIG = RunnerConfig(max_slots=2, context_length=64)


class PacedRunner(NullRunner):
    """The toy model with a given time per step."""

    def __init__(self, config: RunnerConfig, pace: float) -> None:
        super().__init__(config, NullOptions(vocab_size=16))
        self.pace = pace

    def forward(self, rows: Sequence[Row]) -> list[np.ndarray[Any, Any]]:
        time.sleep(self.pace)
        return super().forward(rows)


class PacedProvider(Provider):
    """A provider that counts its trials; it fails without a pace."""

    def __init__(self, name: str, pace: float | None) -> None:
        self.name = name
        self.pace = pace
        self.tried = 0

    def available(self) -> str | None:
        return None

    def passes(self, config: RunnerConfig) -> list[ir.passes.PassBase]:
        return []

    def session(self, model: Path, options: RunnerConfig | None = None) -> Any:
        raise NotImplementedError

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        self.tried += 1
        if self.pace is None:
            raise ProviderRuntimeError(f"{self.name} is out of memory")
        return PacedRunner(config, self.pace)


def files(tmp_path: Path) -> SourceModel:
    ir.save(graph("toy (float[N] x) => (float[N] y) { y = Identity(x) }"), tmp_path / "model.onnx")
    return SourceModel("toy", tmp_path, tmp_path / "model.onnx")


def test_the_fastest_is_chosen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    slow, fast, broken = (
        PacedProvider("slow", 0.01),
        PacedProvider("fast", 0.0),
        PacedProvider("broken", None),
    )
    for _ in range(2):
        choice = fastest_provider(files(tmp_path), CONFIG, [slow, fast, broken])
        assert choice.provider == "fast"
        assert [trial.provider for trial in choice.trials] == ["slow", "fast", "broken"]
        assert "provider fast is the fastest" in str(choice)
        assert "broken cannot run it (broken is out of memory)" in str(choice)
    assert slow.tried == fast.tried == broken.tried == 1
    fastest_provider(files(tmp_path), CONFIG, [slow, broken])  # another choice of providers: measured again
    assert slow.tried == 2


def test_no_provider_can_run_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is not stored: the memory may be free the next time."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    candidates = [PacedProvider("a", None), PacedProvider("b", None)]
    for _ in range(2):
        with pytest.raises(ProviderUnavailableError, match="toy: a: a is out of memory; b: b is"):
            fastest_provider(files(tmp_path), CONFIG, candidates)
    candidates[0].pace = 0.0
    assert fastest_provider(files(tmp_path), CONFIG, candidates).provider == "a"


@pytest.mark.slow
def test_a_real_model_never_runs_on_the_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model("draft", provider="auto", max_slots=1)
    loaded.runner.close()
    assert loaded.choice is not None
    assert loaded.provider == loaded.choice.provider
    assert "cpu" in {trial.provider for trial in loaded.choice.trials if trial.seconds is not None}
    assert "null" not in {trial.provider for trial in loaded.choice.trials}
