"""Prompts that a prefill server computes: equal tokens, and never a longer wait than computing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from engine_kit import alone, make_request, make_runner, run

from carryall.errors import ProviderRuntimeError, UsageError
from carryall.runtime.engine import engine as engine_module
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.requests.prefill_client import ForeignModelError
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.schedule.remote_prefills import RemotePrefills
from carryall.runtime.types.sampling_params import SamplingParams

pytest.importorskip("fsspec")


class Server:
    """A prefill server in this process: an engine of its own on the shared store."""

    def __init__(self, folder: Path) -> None:
        self.engine = open_engine(folder)
        self.asked: list[tuple[int, str | None, float]] = []
        self.fault: Callable[[Future[None]], bool] = lambda future: False

    def begin(self, token_ids: Sequence[int], salt: str | None, seconds: float) -> Future[None]:
        future: Future[None] = Future()
        self.asked.append((len(token_ids), salt, seconds))
        if not self.fault(future):
            one = SamplingParams(temperature=0.0, max_tokens=1)
            run(self.engine, [make_request(f"{len(self.asked)}", token_ids, one, cache_salt=salt)])
            assert self.engine.flush_tiers(10)
            future.set_result(None)
        return future

    def close(self) -> None:
        self.engine.close()


def open_engine(folder: Path, server: str | None = None, tokens: int = 128) -> Engine:
    url = f"file://{folder}"
    config = EngineConfig(prefix_cache_url=url, prefill_server=server, prefill_tokens=tokens)
    return Engine(make_runner(), config, identity="toy")


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Server]:
    """An engine that decodes, and its prefill server."""
    server = Server(tmp_path)
    monkeypatch.setattr(engine_module, "HttpPrefillClient", lambda url, identity: server)
    return open_engine(tmp_path, "http://prefill:8000"), server


def counts(engine: Engine) -> dict[str, int]:
    stats = engine.stats()
    kinds = "remote", "late", "failed", "foreign", "skipped"
    return {kind: count for kind in kinds if (count := getattr(stats, f"prefills_{kind}"))}


def test_a_long_prompt_is_computed_by_the_server_and_a_short_one_here(pair: tuple[Engine, Server]) -> None:
    engine, server = pair
    long, short = make_request("long", 200, cache_salt="tenant"), make_request("short", 100)
    assert run(engine, [long, short]) == [alone(long), alone(short)]
    assert [asked[:2] for asked in server.asked] == [(200, "tenant")]
    assert counts(engine) == {"remote": 1}
    assert long.metrics.cached_tokens == 192
    assert engine.stats().computed_tokens == 8 + 100 + 2 * 11
    turn = make_request(
        "turn", [*long.prompt_token_ids, *long.output_token_ids, *range(20)], cache_salt="tenant"
    )
    assert run(engine, [turn]) == [alone(turn)]
    assert len(server.asked) == 1  # only new tokens count
    engine.close()


def test_samples_of_one_prompt_wait_for_it_together(pair: tuple[Engine, Server]) -> None:
    engine, server = pair
    first = make_request("first", 200)
    further = make_request("further", first.prompt_token_ids, first_sample="first")
    assert run(engine, [first, further]) == [alone(first)] * 2
    assert len(server.asked) == 1
    assert engine.stats().computed_tokens < 200
    engine.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError("away"), "failed"),
        (ProviderRuntimeError("status 500"), "failed"),
        (ForeignModelError("another model"), "foreign"),
    ],
)
def test_a_server_that_fails_is_replaced_by_computing_and_left_alone(
    pair: tuple[Engine, Server], error: Exception, kind: str
) -> None:
    engine, server = pair

    def fail(future: Future[None]) -> bool:
        future.set_exception(error)
        return True

    server.fault = fail
    requests = [make_request(name, 200) for name in "ab"]
    for request in requests:
        assert run(engine, [request]) == [alone(request)]
    assert counts(engine) == {kind: 1, "skipped": 1}
    engine.close()


def test_a_server_that_is_slower_than_computing_is_seldom_asked(
    pair: tuple[Engine, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, server = pair
    monkeypatch.setattr(engine._prefills, "_local_seconds", lambda tokens: 2.0)

    now = 0.0

    def late(future: Future[None]) -> bool:
        nonlocal now
        future.set_exception(TimeoutError("slow"))
        now += 2.0
        return True

    server.fault = late
    engine._prefills._clock = lambda: now
    for i in range(30):
        request = make_request(f"a{i}", np.random.default_rng(i).integers(0, 256, 200).tolist())
        assert run(engine, [request]) == [alone(request)]
    assert 2 <= len(server.asked) <= 4
    assert counts(engine)["late"] + counts(engine)["skipped"] == 30
    engine.close()


def test_a_server_that_hangs_delays_a_request_no_longer_than_computing_takes(
    pair: tuple[Engine, Server],
) -> None:
    engine, server = pair
    now = 0.0
    engine._prefills._clock = lambda: now
    engine.scheduler.costs.observe(0, 1, 200, 2.0)
    server.fault = lambda future: True
    streams, request = make_request("stream", 5), make_request("a", 200)
    engine.add(streams)
    engine.step()
    engine.add(request)
    before = len(streams.output_token_ids)
    for _ in range(3):
        engine.step()
        engine.check_integrity()
    assert len(streams.output_token_ids) == before + 3  # others go on
    assert engine.stats().waiting == 1
    _, _, seconds = server.asked[0]
    assert 0 < seconds <= 2.5  # test_prompt_costs.py has the estimate
    now = seconds
    engine.step()
    assert counts(engine) == {"late": 1}
    assert request.slot is not None
    run(engine)
    assert request.output_token_ids == alone(request)
    engine.close()


def test_a_request_that_waits_can_be_cancelled(pair: tuple[Engine, Server]) -> None:
    engine, server = pair
    server.fault = lambda future: True
    engine.add(make_request("a", 200))
    engine.cancel("a")
    engine.check_integrity()
    assert not engine.has_work
    assert run(engine, [again := make_request("b", 20)]) == [alone(again)]
    engine.close()


def test_a_server_that_lies_costs_only_time(pair: tuple[Engine, Server]) -> None:
    engine, server = pair

    def lie(future: Future[None]) -> bool:
        future.set_result(None)
        return True

    server.fault = lie
    request = make_request("a", 200)
    assert run(engine, [request]) == [alone(request)]
    engine.close()


def test_what_leaves_more_than_kv_is_computed_here() -> None:
    class Never:
        def begin(self, *_: object) -> Future[None]:
            raise AssertionError

        def close(self) -> None:
            pass

    prefills = RemotePrefills(Never(), 10, lambda tokens: None)
    params = SamplingParams(prompt_logprobs=1)
    observed = Request("a", list(range(50)), params)
    observed.queued_tokens = 50
    assert not prefills.add(observed)


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="set prefix_cache_url too"):
        Engine(make_runner(), EngineConfig(prefill_server="http://host:1"), identity="toy")
    for url in ("host:8000", "ftp://host", "http://", "http://host:x", "http://host:99999"):
        with pytest.raises(UsageError, match="prefill_server must be a URL"):
            open_engine(tmp_path, url)
