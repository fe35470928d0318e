"""New prompts that share a run on ``cuda``, with the CPU as the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_stand_ins import CudaOnCpu, threaded

from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.pipeline.pipeline import run
from carryall.providers.base import BestLogits, Row, RunnerConfig
from carryall.providers.targets import cuda
from carryall.runtime.tasks import selftest_models as models

SLOTS = 4
Make = Callable[..., Any]


@pytest.fixture(params=["llama", "gpt2", "gemma3_text", "qwen3_moe"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Return a function that opens a runner of a small random model with options."""

    def opened(**options: Any) -> Any:
        config = RunnerConfig(
            max_slots=SLOTS,
            context_length=models.CONTEXT,
            num_threads=1,
            options={"top_logits": 8, **options},
        )
        folder = tmp_path / f"options-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        model, _ = run(models.decoder(request.param, "float"), CudaOnCpu().passes(config))
        save_model(model, folder / "model.onnx")
        return CudaOnCpu().runner(folder / "model.onnx", config)

    return opened


def prompts(*sizes: int) -> list[Row]:
    rng = np.random.default_rng(1)
    return [Row(slot, rng.integers(1, 500, size), 0) for slot, size in enumerate(sizes)]


def test_they_have_the_logits_of_a_run_each(make: Make) -> None:
    together, alone = make(joint_prompts=True), make(joint_prompts=False)
    rows = prompts(21, 17, 30)
    for row in rows:
        row.best_suffice = row.slot != 1
    for one, other in zip(together.forward_best(rows), alone.forward_best(rows), strict=True):
        assert type(one) is type(other)
        if isinstance(one, BestLogits):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_allclose(one.logits, other.logits, atol=1e-4)
            assert one.logsumexp == pytest.approx(other.logsumexp, abs=1e-4)
            one, other = one.whole(), other.whole()
        np.testing.assert_allclose(one, other, atol=1e-4)
    kinds = {key for key in threaded(together).bindings.runs if key[0] != "decode"}
    assert ("prefill", 0, 3) in kinds
    steps = [Row(row.slot, np.array([5]), len(row.tokens)) for row in rows]
    for one, other in zip(together.forward(steps), alone.forward(steps), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    together.close()
    alone.close()


def test_they_run_alone_where_they_disagree(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "joint_prompts_agree", lambda runner: False)
    with caplog.at_level(logging.WARNING):
        runner = make()
    assert "prompts run one by one" in caplog.text
    runner.forward(prompts(9, 9))
    assert ("prefill", 0, 2) not in threaded(runner).bindings.runs
    runner.close()
