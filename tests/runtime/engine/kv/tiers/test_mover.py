"""KV moved out of its slot and back: restored KV equals computed KV, whatever happens to the files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_kit import GREEDY, alone, make_request, make_runner, run

from carryall.errors import ProviderRuntimeError, UsageError
from carryall.providers.targets.null import NullRunner
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.kv.tiers.disk import DiskTier
from carryall.runtime.engine.kv.tiers.host import HostTier
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.types.sampling_params import SamplingParams

PROMPT = np.random.default_rng(0).integers(0, 256, 200).tolist()


def open_engine(
    folder: Path | None = None, *, identity: str = "toy", max_slots: int = 2, **options: Any
) -> tuple[Engine, NullRunner]:
    runner = make_runner(max_slots=max_slots)
    return Engine(runner, EngineConfig(prefix_cache_dir=folder, **options), identity=identity), runner


def ask(name: str, salt: str | None = None) -> Request:
    return make_request(name, [*PROMPT, len(name)], GREEDY, cache_salt=salt)


def fill(folder: Path) -> None:
    """Run a request and write its KV to files."""
    engine, _ = open_engine(folder)
    run(engine, [ask("first")])
    engine.close()
    assert len(list(folder.glob("??/*.kv"))) == 3


def check(folder: Path, restored: int, lost: int = 0, **options: Any) -> None:
    """Run a request in a new engine; check the number of restored tokens and the output."""
    engine, _ = open_engine(folder, **options)
    request = ask("second")
    assert run(engine, [request]) == [alone(request)]
    stats = engine.stats()
    assert (stats.kv_restored_tokens, stats.kv_lost_chunks) == (restored, lost)
    assert request.metrics.cached_tokens == restored
    engine.close()


def test_a_prefix_survives_a_restart(tmp_path: Path) -> None:
    fill(tmp_path)
    check(tmp_path, restored=192)


def test_another_model_s_files_are_not_found(tmp_path: Path) -> None:
    fill(tmp_path)
    check(tmp_path, restored=0, identity="other")


def test_salts_keep_tenants_apart(tmp_path: Path) -> None:
    engine, _ = open_engine(tmp_path)
    run(engine, [ask("a", salt="x")])
    engine.close()
    engine, _ = open_engine(tmp_path)
    for name, salt, found in (("b", "y", 0), ("c", None, 0), ("d", "x", 192)):
        request = ask(name, salt)
        assert run(engine, [request]) == [alone(request)]
        assert request.metrics.cached_tokens == found
    engine.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "foreign"])
def test_damaged_chunks_are_computed_again(tmp_path: Path, damage: str) -> None:
    fill(tmp_path)
    engine, _ = open_engine(tmp_path)
    request = ask("second")
    engine.add(request)
    path = max(tmp_path.glob("??/*.kv"), key=lambda file: file.stat().st_mtime_ns)
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-9] ^= 4
    path.write_bytes(content[:-9] if damage == "cut" else content)
    if damage == "gone":
        path.unlink()
    if damage == "foreign":
        path.write_bytes(bytes(content).replace(b"carryall-kv 4", b"carryall-kv 0"))
    assert run(engine) == []
    assert request.output_token_ids == alone(request)
    stats = engine.stats()
    assert stats.kv_restored_tokens in (0, 64, 128)
    assert stats.kv_lost_chunks <= 1  # a file deleted before the lookup is not a fault
    engine.close()
    check(tmp_path, restored=192)  # written again


def test_views_of_a_runner_are_copied_and_its_own_arrays_are_not() -> None:
    runner, given = make_runner(max_slots=1), list[Any]()
    engine = Engine(runner, EngineConfig(swap_bytes=1 << 20))
    read, buffer = runner.read_kv, np.zeros(4096, np.int64)

    def alternating(slot: int, start: int, length: int) -> list[Any]:
        (part,) = read(slot, start, length)
        if start:
            given.append(part)
            return [part]
        buffer[: len(part)] = part
        return [buffer[: len(part)]]

    runner.read_kv = alternating  # type: ignore[method-assign]
    run(engine, [make_request("a", list(range(1, 131)))])
    run(engine, [make_request("b", list(range(200, 70, -1)))])  # takes the slot
    buffer[:] = -1
    assert isinstance(engine._mover._tier, HostTier)
    chunks = engine._mover._tier._chunks.values()
    stored = [part for parts in chunks for part in parts]
    assert any(part is own for part in stored for own in given)
    assert not any((part == -1).any() for part in stored)


def test_what_leaves_a_slot_is_kept_in_host_memory_though_files_have_it(tmp_path: Path) -> None:
    fill(tmp_path)
    engine, _ = open_engine(tmp_path, swap_bytes=1 << 20)
    assert run(engine, [ask("second")]) == [alone(ask("second"))]
    assert engine.stats().kv_saved_tokens == 0  # not again while the slot has it
    engine.scheduler.cache.clear(save=True)  # as other texts evict it
    run(engine, [make_request("other", 10, GREEDY)])
    shutil.rmtree(tmp_path)
    assert run(engine, [third := ask("third")]) == [alone(third)]
    assert third.metrics.cached_tokens == 192
    engine.close()


def test_a_preempted_request_gets_its_kv_back() -> None:
    engine, runner = open_engine(kv_bytes=300, swap_bytes=10**6)
    requests = [make_request(name, 140, GREEDY) for name in "ab"]
    assert run(engine, requests) == [alone(request) for request in requests]
    stats = engine.stats()
    assert stats.preemptions >= 1
    assert stats.kv_restored_tokens >= 128
    assert stats.computed_tokens < 2 * (140 + 12) + 64
    engine.close()
    assert runner.closed


def test_a_runner_that_fails_to_take_or_give_kv_costs_only_time(tmp_path: Path) -> None:
    fill(tmp_path)
    engine, runner = open_engine(tmp_path)
    write_kv, calls = runner.write_kv, 0

    def failing(slot: int, start: int, length: int, parts: Sequence[Any]) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            del runner.hashes[slot][start:]
            raise ProviderRuntimeError("device fell over")
        write_kv(slot, start, length, parts)

    runner.write_kv = failing  # type: ignore[method-assign]
    request = ask("second")
    assert run(engine, [request]) == [alone(request)]
    assert engine.stats().kv_restored_tokens == 64

    def unreadable(slot: int, start: int, length: int) -> list[Any]:
        raise ProviderRuntimeError("device fell over")

    runner.read_kv = unreadable  # type: ignore[method-assign]
    run(engine, [make_request(str(n), 100, GREEDY) for n in range(3)])
    assert engine.stats().kv_saved_tokens == 0
    engine.close()


def test_the_target_of_a_failed_copy_is_discarded() -> None:
    """A running request takes an idle slot whose content fails to be copied out."""
    engine, runner = open_engine(max_slots=5, swap_bytes=10**6)
    copy_prefix = runner.copy_prefix

    def cut_off(source: int, target: int, length: int) -> None:
        copy_prefix(source, target, length)
        if (source, target) == (1, 4):
            runner.hashes[target] = [0] * length
            raise ProviderRuntimeError("no")

    runner.copy_prefix = cut_off  # type: ignore[method-assign]
    lengths = (60, 2, 2, 59)
    requests = [
        make_request(str(i), 100, SamplingParams(temperature=0.0, max_tokens=n))
        for i, n in enumerate(lengths)
    ]
    assert run(engine, requests) == [alone(request) for request in requests]
    engine.clear_prefix_cache()
    again = make_request("again", requests[1].prompt_token_ids)
    assert run(engine, [again]) == [alone(again)]
    assert again.metrics.cached_tokens == 0
    engine.close()


def test_restoring_shares_steps_with_running_requests(tmp_path: Path) -> None:
    fill(tmp_path)
    engine, _ = open_engine(tmp_path)
    runs, restored = make_request("runs", 5, GREEDY), ask("second")
    engine.add(runs)
    engine.step()
    engine.add(restored)
    engine.step()
    assert len(runs.output_token_ids) == 2
    assert run(engine) == []
    assert restored.output_token_ids == alone(restored)
    engine.close()


def test_a_tier_slower_than_computing_is_left_alone(tmp_path: Path) -> None:
    fill(tmp_path)
    engine, _ = open_engine(tmp_path)
    engine._mover._seconds_per_token = 1.0
    engine.scheduler.costs.observe(0, 1, 200, 0.1)
    assert run(engine, [request := ask("second")]) == [alone(request)]
    assert engine.stats().kv_restored_tokens == 0
    engine.close()


def test_a_short_prompt_does_not_tell_that_a_tier_is_slow(tmp_path: Path) -> None:
    """A service that has computed its warm-up only restores what others computed."""
    fill(tmp_path)
    engine, _ = open_engine(tmp_path)
    engine._mover._seconds_per_token = 1.0
    engine.scheduler.costs.observe(0, 1, 8, 1e-6)
    assert run(engine, [request := ask("second")]) == [alone(request)]
    assert engine.stats().kv_restored_tokens > 0
    engine.close()


def test_closing_waits_until_all_is_written(tmp_path: Path) -> None:
    engine, _ = open_engine(tmp_path, max_slots=4)
    tier = engine._mover._tier
    assert isinstance(tier, DiskTier)
    tier._max_pending_bytes = 64 * 8  # one chunk
    run(engine, [make_request(str(n), 190, GREEDY) for n in range(4)])
    engine.close()
    assert tier.given_up == 0
    assert len(list(tmp_path.glob("??/*.kv"))) == 12


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="identity"):
        open_engine(tmp_path, identity="")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        open_engine(tmp_path / "file")
