"""What a runner in another process cannot do, whatever its child can."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engine_kit import make_runner

from carryall.providers.base import RunnerConfig
from carryall.providers.runners.process_runner import ProcessRunner
from carryall.providers.runners.runner_process import RunnerProcess, software


def test_best_logits_and_steps_ahead_do_not_cross_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    able = dataclasses.replace(make_runner().info, top_logits=64, steps_ahead=1)
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **named: None)
    monkeypatch.setattr(RunnerProcess, "call", lambda self, *message: (able, software()))
    info: Any = ProcessRunner("cuda", Path("model.onnx"), RunnerConfig()).info
    assert (info.top_logits, info.steps_ahead) == (0, 0)
    assert info.context_length == able.context_length
