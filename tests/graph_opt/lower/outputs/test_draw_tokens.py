"""Tokens drawn by the graph, beside those that the host draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from engines import onnxruntime

from carryall.graph_opt.lower.outputs.draw_tokens import DrawTokensPass
from carryall.graph_opt.lower.outputs.top_logits import TopLogitsPass
from carryall.providers.base import Draw
from carryall.providers.draws import controls_of
from carryall.runtime.engine.sampling.filters import Filters
from carryall.runtime.engine.sampling.random_sampling import sample_random

SIZE, ROWS = 500, 40
TEXT = f"""<ir_version: 10, opset_import: ["": 23]> g
    (float[wanted, 1, {SIZE}] x, int64[tokens, 1] input_ids) =>
    (float[wanted, 1, {SIZE}] logits, int64[tokens, 1] ids)
    {{ logits = Identity(x) ids = Identity(input_ids) }}"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[dict[str, Any]], list[Any]]:
    model = ir.from_onnx_text(TEXT)
    for each in (TopLogitsPass(64), DrawTokensPass()):
        each(model)
    ir.save(model, tmp_path / "draw.onnx")
    made: Callable[[dict[str, Any]], list[Any]] = onnxruntime(tmp_path / "draw.onnx")
    return made


def feeds(logits: Any, draws: list[Draw | None], **more: Any) -> dict[str, Any]:
    tokens: dict[str, Any] = {
        "input_ids": np.array([[3]]),
        "token_sources": np.array([[0]]),
        "drawn_before": np.zeros(4, np.int64),
    }
    return {"x": logits, "draw": controls_of(draws, len(draws)), **tokens, **more}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.3, "top_k": 64, "top_p": 0.7},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.5, "top_p": 0.3, "min_p": 0.05},
        {"temperature": 0.6, "min_p": 0.2},
        {"temperature": 0.6, "top_k": 1},
        {"temperature": 0.8},
        {"temperature": 2.0},
    ],
    ids=str,
)
def test_drawn_tokens_are_those_of_the_host(
    run: Callable[[dict[str, Any]], list[Any]], options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, (ROWS, 1, SIZE)).astype(np.float32)
    uniforms = [*rng.random(ROWS - 2).tolist(), 0.0, 1 - 2**-30]
    drawn = run(feeds(logits, [Draw(uniform, **options) for uniform in uniforms]))[-1]
    if not options["temperature"]:
        np.testing.assert_array_equal(drawn, logits[:, 0].argmax(axis=1))
        return
    filters = [Filters(**options)] * ROWS
    expected = sample_random(list(logits[:, 0]), filters, np.array(uniforms)).token_ids
    best = np.take_along_axis(logits[:, 0], expected[:, None], 1) >= np.sort(logits[:, 0])[:, -64:][:, :1]
    assert best.mean() >= 0.7
    equal = np.mean((expected == drawn)[best[:, 0]])
    assert equal >= 0.97  # cumulated weights in float32 may round across the uniform


def test_negative_ids_are_tokens_of_the_run_before(run: Callable[[dict[str, Any]], list[Any]]) -> None:
    logits = np.zeros((1, 1, SIZE), np.float32)
    found = run(
        feeds(
            logits,
            [None],
            input_ids=np.array([[5], [-1], [7], [-1]]),
            token_sources=np.array([[0], [2], [0], [1]]),
            drawn_before=np.array([100, 101, 102, 103]),
        )
    )
    np.testing.assert_array_equal(found[1], [[5], [102], [7], [101]])
