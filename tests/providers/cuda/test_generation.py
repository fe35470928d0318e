"""Texts with carryall's CUDA kernels, which the emulator runs, beside those with onnxruntime's operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_emulator import EmulatedCudaOnCpu
from device_stand_ins import threaded
from engine_kit import make_request, run
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.pipeline import pipeline
from carryall.providers.base import RunnerConfig
from carryall.runtime.engine.engine import Engine
from carryall.runtime.types.sampling_params import SamplingParams

CONTEXT, SLOTS, VOCAB, LAYERS = 100, 4, 260, 2
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 30, "min_p": 0.01},
    {"temperature": 0.7, "top_p": 0.5, "logprobs": 3},
]


def opened(checkpoint: Path, folder: Path, kernels: str) -> tuple[Any, list[str]]:
    """Return a runner, and the operators of its graph."""
    provider, options = EmulatedCudaOnCpu(), {"kernels": kernels}
    config = RunnerConfig(max_slots=SLOTS, context_length=CONTEXT, num_threads=1, options=options)
    lowered, _ = pipeline.run(export_model(checkpoint), provider.passes(config))
    operators = [node.op_type for node in lowered.graph]
    (folder / kernels).mkdir()
    save_model(lowered, folder / kernels / "model.onnx")
    return provider.runner(folder / kernels / "model.onnx", config), operators


def texts(runner: Any) -> list[Any]:
    engine, rng = Engine(runner), np.random.default_rng(7)
    requests = [
        make_request(
            f"r{i}",
            rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist(),
            SamplingParams(**{"seed": i, "max_tokens": 6, **WAYS[i % len(WAYS)]}),
            end_token_ids=[3],
        )
        for i in range(8)
    ]
    tokens = run(engine, requests)
    return [tokens, [(request.finish_reason, str(request.error)) for request in requests]]


@pytest.mark.long
def test_texts_are_those_of_onnxruntimes_operators(tmp_path: Path) -> None:
    checkpoint = write_tiny("qwen3", tmp_path / "checkpoint")
    own, operators = opened(checkpoint, tmp_path, "carryall")
    others, before = opened(checkpoint, tmp_path, "onnxruntime")
    assert operators.count("SiluAndMul") == LAYERS
    assert operators.count("DrawTokens") == 1
    assert not {"TopK", "QuickGelu", "CumSum"} & set(operators)
    assert {"TopK", "QuickGelu", "CumSum"} <= set(before)
    emulator = EmulatedCudaOnCpu().emulator
    runs = emulator.launches
    session = threaded(own).session.session
    counted = []
    run_session = session.run_with_iobinding

    class Counted:
        def run_with_iobinding(self, *arguments: Any) -> None:
            counted.append(1)
            run_session(*arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(session, name)

    threaded(own).session.session = Counted()
    found = texts(own)
    assert emulator.launches == runs + (LAYERS + 1) * len(counted) > runs
    assert found == texts(others)
