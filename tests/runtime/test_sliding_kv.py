"""Layers with a sliding window keep only their window, and nobody can tell."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from tiny_models import write_tiny

from carryall.providers.base import TrimmingRunner
from carryall.runtime.engine.engine import EngineConfig
from carryall.runtime.llm import LLM
from carryall.runtime.sampling_params import SamplingParams

pytest.importorskip("onnxruntime")

GREEDY = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)


def test_trimmed_equals_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    checkpoint = write_tiny("mistral", tmp_path / "tiny", sliding_window=70, max_position_embeddings=2048)
    prompts = [np.random.default_rng(n).integers(0, 256, size).tolist() for n, size in enumerate((700, 30))]

    def generate(prefix_cache: bool) -> tuple[list[list[int]], list[int]]:
        trimmed: list[int] = []
        config = EngineConfig(prefix_cache=prefix_cache)
        with LLM(checkpoint, max_slots=2, num_threads=1, engine_config=config) as llm:
            runner = cast(TrimmingRunner, llm._engine._runner)
            assert runner.info.sliding_window == 70
            trim = runner.trim

            def recording(slot: int, length: int) -> None:
                trimmed.append(length)
                trim(slot, length)
                memory = runner._kv._kv.buffers["past_key_values.0.key"]  # type: ignore[attr-defined]
                assert not memory[slot, :, :64].any()
                assert memory[slot, :, length - 69 : length].all()

            runner.trim = recording  # type: ignore[method-assign]
            for output in llm.stream(prompts[0], GREEDY):
                if len(output.outputs[0].token_ids) == 100:
                    stats = llm.stats()
                    resident.append(stats.kv_bytes / (stats.kv_tokens * runner.info.kv_bytes_per_token))
                    break
            return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)], trimmed

    resident: list[float] = []
    whole, never = generate(prefix_cache=True)
    trimmed, lengths = generate(prefix_cache=False)
    assert never == []
    assert len(lengths) >= 3
    assert trimmed == whole
    assert resident[0] == 1.0
    assert resident[1] < 0.15
