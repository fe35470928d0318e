"""Requests that wait for a grammar block no other request, and wait for a limited time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from engine_kit import GREEDY, alone, make_engine, make_request, make_runner, run

from carryall.errors import InvalidSamplingError, RequestError
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.requests.request import Grammar, Request


class Countdown:
    """A grammar that allows one token a given number of times, then ends or fails."""

    lowers = True

    def __init__(self, token: int, count: int, error: str = "") -> None:
        self.token, self.count, self._error = token, count, error

    @property
    def finished(self) -> bool:
        return self.count == 0

    @property
    def error(self) -> str:
        return self._error if self.finished else ""

    def prepare(self) -> None:
        """Do nothing."""

    def ready(self, seconds: float) -> bool:
        return True

    def observe(self, token: int) -> None:
        assert token == self.token
        self.count -= 1

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        kept = logits[self.token]
        logits.fill(-np.inf)
        if not self.finished:
            logits[self.token] = kept

    def forced_tokens(self) -> list[int]:
        return [self.token] * self.count

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        return min(len(tokens), self.count)

    def copy(self) -> Countdown:
        return Countdown(self.token, self.count, self._error)


def demanding(name: str, future: Future[Grammar]) -> Request:
    return Request(name, [1, 2, 3], GREEDY, grammar=future)


def test_others_go_on_while_a_grammar_is_compiled_and_its_end_is_the_request_s() -> None:
    engine, _ = make_engine()
    future: Future[Grammar] = Future()
    waiting, other = demanding("a", future), make_request("b")
    engine.add(waiting)
    engine.add(other)
    for _ in range(4):
        engine.step()
        engine.check_integrity()
    assert (waiting.slot, len(other.output_token_ids)) == (None, 4)
    assert engine.stats().waiting == 1
    future.set_result(Countdown(9, 3))
    run(engine)
    assert (waiting.output_token_ids, waiting.finish_reason) == ([9, 9, 9], "stop")
    assert other.output_token_ids == alone(make_request("b"))


def test_one_grammar_serves_many_requests() -> None:
    engine, _ = make_engine()
    future: Future[Grammar] = Future()
    future.set_result(Countdown(9, 3))
    assert run(engine, [demanding(str(i), future) for i in range(6)]) == [[9, 9, 9]] * 6


def test_a_refused_grammar_fails_its_request() -> None:
    engine, _ = make_engine()
    future: Future[Grammar] = Future()
    future.set_exception(InvalidSamplingError("no such thing"))
    request = demanding("a", future)
    run(engine, [request])
    assert (request.finish_reason, request.error) == ("error", "no such thing")
    assert isinstance(request.fault, InvalidSamplingError)


def test_a_library_that_fails_fails_the_request_alone() -> None:
    class Panic(BaseException):
        """Like the panic of Rust bindings, which does not derive from Exception."""

    engine, _ = make_engine()
    future: Future[Grammar] = Future()
    future.set_exception(Panic("index out of bounds"))
    request, other = demanding("a", future), make_request("b")
    run(engine, [request, other])
    assert request.error == "the grammar could not be compiled: Panic('index out of bounds')"
    assert isinstance(request.fault, RequestError)
    assert other.output_token_ids == alone(other)


def test_no_request_waits_forever() -> None:
    engine = Engine(make_runner(), EngineConfig(grammar_timeout_seconds=0.02))
    request = demanding("a", Future())
    run(engine, [request])
    assert request.error == "the grammar took more than 0.02 s to compile"


def test_a_request_may_be_cancelled_while_it_waits() -> None:
    engine, _ = make_engine()
    engine.add(demanding("a", Future()))
    engine.step()
    assert engine.cancel("a") is not None
    assert not engine.has_work
    engine.check_integrity()


def test_a_grammar_that_breaks_says_why() -> None:
    engine, _ = make_engine()
    future: Future[Grammar] = Future()
    future.set_result(Countdown(9, 2, "too complex"))
    request = demanding("a", future)
    run(engine, [request])
    assert (request.output_token_ids, request.error) == ([9, 9], "too complex")
    assert request.fault is None
