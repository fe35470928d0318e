"""States in the tiers: a later process resumes a text, and equals one that computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_kit import VOCAB, make_request, run

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import RunnerConfig
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.types.sampling_params import SamplingParams

PROMPT: list[int] = np.random.default_rng(0).integers(0, VOCAB, 200).tolist()


def open_engine(folder: Path | None = None, **options: Any) -> tuple[Engine, NullRunner]:
    null = NullOptions(vocab_size=VOCAB, kv_bytes_per_token=1, state_bytes=30)
    runner = NullRunner(RunnerConfig(max_slots=2, context_length=512), null)
    return Engine(runner, EngineConfig(prefix_cache_dir=folder, **options), identity="toy"), runner


def ask(name: str, tokens: list[int], count: int = 6) -> Request:
    return make_request(name, tokens, SamplingParams(temperature=0.0, max_tokens=count))


def alone(request: Request) -> list[int]:
    engine, _ = open_engine(prefix_cache=False)
    return run(engine, [Request(request.request_id, request.prompt_token_ids, request.params)])[0]


def fill(folder: Path, count: int = 6) -> Request:
    """Run a request and write its KV and states to files."""
    engine, _ = open_engine(folder)
    request = ask("first", PROMPT, count)
    run(engine, [request])
    engine.close()
    return request


def check(folder: Path, tokens: list[int], restored: int, lost: int = 0) -> Engine:
    """Run a request in a new engine; check the number of restored tokens and the output."""
    engine, _ = open_engine(folder)
    request = ask("second", tokens)
    assert run(engine, [request]) == [alone(request)]
    stats = engine.stats()
    assert (stats.kv_restored_tokens, stats.kv_lost_chunks) == (restored, lost)
    assert request.metrics.cached_tokens == restored
    engine.check_integrity()
    engine.close()
    return engine


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.kv"), key=lambda file: file.stat().st_size)


def test_a_prompt_is_resumed_at_its_last_chunk(tmp_path: Path) -> None:
    fill(tmp_path)
    assert len(files(tmp_path)) == 3 + 1
    check(tmp_path, PROMPT, restored=192)


def test_a_conversation_is_resumed_near_the_end_of_its_answer(tmp_path: Path) -> None:
    request = fill(tmp_path, 150)
    check(tmp_path, [*PROMPT, *request.output_token_ids, 3, 1], restored=320)
    check(tmp_path, [*PROMPT, 5, 5], restored=192)


def test_where_a_state_is_missing_the_third_request_finds_one(tmp_path: Path) -> None:
    fill(tmp_path)
    parted = [*PROMPT[:150], *range(60)]
    check(tmp_path, parted, restored=0)  # KV of 128 tokens is there, but no state
    check(tmp_path, [*PROMPT[:150], 9, 9], restored=128)


@pytest.mark.parametrize("kind", ["state", "chunk"])
@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_damaged_states_and_chunks_are_computed_again(tmp_path: Path, kind: str, damage: str) -> None:
    fill(tmp_path)
    engine, _ = open_engine(tmp_path)
    request = ask("second", PROMPT)
    engine.add(request)
    path = files(tmp_path)[0 if kind == "state" else -1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink() if damage == "gone" else path.write_bytes(content)
    run(engine)
    assert request.output_token_ids == alone(request)
    assert engine.stats().kv_restored_tokens == 0
    engine.check_integrity()
    engine.close()
    check(tmp_path, PROMPT, restored=192)  # written again


def test_a_runner_that_fails_to_take_or_give_states_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    engine, runner = open_engine(tmp_path)

    def failing(*_: Any) -> Any:
        raise ProviderRuntimeError("device fell over")

    monkeypatch.setattr(runner, "write_state", failing)
    monkeypatch.setattr(runner, "read_state", failing)
    request = ask("second", PROMPT)
    assert run(engine, [request]) == [alone(request)]
    assert engine.stats().kv_restored_tokens == 0
    engine.close()


def test_a_preempted_request_goes_on_near_where_it_was() -> None:
    engine, _ = open_engine(swap_bytes=10**6, kv_bytes=700)
    request = ask("a", PROMPT, 150)
    engine.add(request)
    while len(request.output_token_ids) < 140:
        engine.step()
    engine.scheduler.preempt(request)
    engine.scheduler.cache.clear(save=True)
    engine.clear_prefix_cache()  # carries out what is queued
    run(engine)
    assert engine.stats().kv_restored_tokens == 320
    assert request.output_token_ids == alone(request)
    engine.close()
