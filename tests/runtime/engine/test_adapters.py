"""LoRA adapters in the engine: places, prefixes, and requests that wait."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tiny_lora import write_adapter

from carryall.errors import RequestError, UnknownModelError, UsageError
from carryall.exporter.adapter import LoraAdapter
from carryall.providers.base import RunnerConfig, RunnerInfo
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.engine.adapters import AdapterSet
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.speculation.proposer import Proposer, Tokens
from carryall.runtime.types.sampling_params import SamplingParams

PROMPT = list(range(1, 40))


def adapter(name: str) -> LoraAdapter:
    content = np.full((1, 1), ord(name), np.float32)
    return LoraAdapter(f"key {name}", 1, {"layer": (content, content)}, name)


ADAPTERS = {name: adapter(name) for name in "abc"}


def engine(
    max_loras: int = 2, max_slots: int = 4, proposer: Proposer | None = None, **options: object
) -> Engine:
    runner = NullRunner(
        RunnerConfig(max_slots=max_slots, max_loras=max_loras),
        NullOptions(vocab_size=64, kv_bytes_per_token=1),
    )
    config = EngineConfig(**options)  # type: ignore[arg-type]
    return Engine(runner, config, proposer, "toy")


class Told:
    """Proposes known tokens."""

    max_tokens = 4

    def __init__(self, known: list[int]) -> None:
        self._known = known

    def evidence(self, request: Request) -> int | None:
        return 0

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        begins = [(len(request.output_token_ids), count) for request, count in wanted]
        return [np.array(self._known[begin : begin + count], np.int64) for begin, count in begins]

    def forget(self, request: Request) -> None:
        pass

    def close(self) -> None:
        pass


def request(name: str, lora: str | None, tokens: list[int] | None = None, max_tokens: int = 6) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(name, tokens or PROMPT, params, adapter=None if lora is None else ADAPTERS[lora])


def run(made: Engine, requests: list[Request]) -> list[list[int]]:
    for one in requests:
        made.add(one)
    while made.has_work:
        made.step()
        made.check_integrity()
    return [one.output_token_ids for one in requests]


def alone(lora: str | None) -> list[int]:
    return run(engine(), [request("alone", lora)])[0]


def test_requests_of_several_adapters_share_a_batch() -> None:
    expected = {lora: alone(lora) for lora in (None, "a", "b", "c")}
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    loras = ["a", None, "b", "c"]
    found = run(engine(max_loras=3), [request(f"r{i}", lora) for i, lora in enumerate(loras)])
    assert found == [expected[lora] for lora in loras]


@pytest.mark.parametrize("max_loras", [1, 2])
def test_requests_wait_for_a_place(max_loras: int) -> None:
    loras = ["a", "b", "c", None, "a", "c", "b"]
    made, most = engine(max_loras), 0
    requests = [request(f"r{i}", lora) for i, lora in enumerate(loras)]
    for one in requests:
        made.add(one)
    while made.has_work:
        made.step()
        made.check_integrity()
        running, waiting = made.adapter_names()
        most = max(most, len(running))
        assert set(running) | set(waiting) <= set("abc")
    assert most == max_loras
    assert [one.output_token_ids for one in requests] == [alone(lora) for lora in loras]


def test_the_least_recently_used_adapter_is_evicted() -> None:
    made = engine(max_loras=2)
    for lora in ("a", "b", "a", "c"):
        run(made, [request(lora, lora)])
    assert list(made.scheduler.adapters._places) == ["key a", "key c"]


def test_prefixes_are_shared_only_by_requests_of_the_same_adapter() -> None:
    made = engine(max_loras=2, max_slots=8)
    cached = []
    for lora in ("a", "a", "b", None, "b", None):
        one = request("r", lora)
        run(made, [one])
        cached.append(one.metrics.cached_tokens)
        assert one.output_token_ids == alone(lora)
    assert cached[0] == cached[2] == cached[3] == 0
    assert min(cached[1], cached[4], cached[5]) == len(PROMPT) - 1


def test_salts_of_callers_cannot_reach_the_prefixes_of_an_adapter() -> None:
    made = engine(max_loras=2)
    run(made, [request("r", "a")])
    salted = request("s", None)
    salted.cache_salt = str(request("r", "a").kv_salt)
    run(made, [salted])
    assert salted.metrics.cached_tokens == 0


def test_preempted_requests_continue_with_their_adapter() -> None:
    loras = ["a", "b", "a", None]
    made = engine(max_loras=1, max_slots=4, kv_bytes=110, prefix_cache=False)
    found = run(made, [request(f"r{i}", lora, max_tokens=30) for i, lora in enumerate(loras)])
    assert made.stats().preemptions
    long = {lora: run(engine(), [request("x", lora, max_tokens=30)])[0] for lora in loras}
    assert found == [long[lora] for lora in loras]


def test_tiers_keep_the_kv_of_adapters_apart(tmp_path: Path) -> None:
    prompt = [1 + i % 50 for i in range(200)]

    def outputs(lora: str | None) -> tuple[list[int], int]:
        made = engine(prefix_cache_dir=tmp_path)
        found = run(made, [request("r", lora, prompt)])[0]
        restored = made.stats().kv_restored_tokens
        made.close()
        return found, restored

    first = {lora: outputs(lora) for lora in ("a", None)}
    again = {lora: outputs(lora) for lora in ("a", None)}
    assert [restored for _, restored in first.values()] == [0, 0]
    assert all(again[lora][0] == first[lora][0] for lora in first)


def test_speculation_verifies_with_the_adapter() -> None:
    plain = run(engine(), [request("r", "a", max_tokens=20)])[0]
    made = engine(proposer=Told(plain), adaptive_speculation=False)
    assert run(made, [request("r", "a", max_tokens=20)])[0] == plain
    stats = made.stats()
    assert 0 < stats.accepted_tokens == stats.proposed_tokens


INFO = RunnerInfo(64, 64, 4, (), True, max_loras=1, max_lora_rank=4, lora_modules={"layers.0.q_proj": (8, 6)})


def test_adapters_are_loaded_and_unloaded_by_name(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", {"layers.0.q_proj": (6, 8)})
    write_adapter(tmp_path / "b", {"layers.0.q_proj": (6, 8)}, seed=2)
    made = AdapterSet(INFO)
    made.load("x", tmp_path / "a")
    first = made.get("x")
    with pytest.raises(RequestError, match="there is a LoRA adapter 'x' already"):
        made.load("x", tmp_path / "b")
    made.load("x", tmp_path / "b", replace=True)
    assert made.get("x").key != first.key
    assert made.paths == {"x": str(tmp_path / "b")}
    made.unload("x")
    for ask in (made.get, made.unload):
        with pytest.raises(UnknownModelError, match="no LoRA adapter 'x'; there are: none"):
            ask("x")


@pytest.mark.parametrize(("name", "folder"), [("", "a"), (3, "a"), ("a\nb", "a"), ("x", ""), ("x", 3)])
def test_names_and_folders_are_checked(name: object, folder: object) -> None:
    with pytest.raises(RequestError):
        AdapterSet(INFO).load(name, folder)  # type: ignore[arg-type]


def test_a_model_without_places_takes_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="load it with max_loras"):
        AdapterSet().load("x", tmp_path)
