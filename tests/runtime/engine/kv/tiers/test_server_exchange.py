"""Answers of a server of the Redis protocol: they are read whatever pieces they come in, or refused."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.runtime.engine.kv.tiers.server_exchange import ServerExchange

ANSWERS = st.lists(st.one_of(st.integers(0, 99), st.none(), st.binary(max_size=9000)), max_size=8)


def encoded(answer: int | bytes | None) -> bytes:
    if answer is None:
        return b"$-1\r\n"
    return b":%d\r\n" % answer if isinstance(answer, int) else b"$%d\r\n%s\r\n" % (len(answer), answer)


class Pair:
    """An exchange, and the socket of its server."""

    def __init__(self) -> None:
        own, self.server = socket.socketpair()
        self.exchange = ServerExchange(own)
        self._own = own
        self._sending = threading.Thread()

    def answer(self, pieces: Sequence[bytes]) -> None:
        def send() -> None:
            for piece in pieces:
                self.server.sendall(piece)

        self._sending = threading.Thread(target=send)
        self._sending.start()

    def next(self, seconds: float = 10.0) -> int | bytes | None:
        answer = self.exchange.next(time.monotonic() + seconds)
        return bytes(answer) if isinstance(answer, memoryview) else answer

    def close(self) -> None:
        if self._sending.ident is not None:
            self._sending.join()
        self._own.close()
        self.server.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@given(ANSWERS, st.lists(st.integers(1, 5000), max_size=5))
def test_answers_come_in_any_pieces(answers: list[int | bytes | None], cuts: list[int]) -> None:
    pair = Pair()
    content, pieces = b"".join(map(encoded, answers)), list[bytes]()
    for cut in cuts:
        pieces.append(content[:cut])
        content = content[cut:]
    pair.answer([*pieces, content])
    assert [pair.next() for _ in answers] == answers
    pair.close()


def test_values_share_a_buffer_that_grows(pair: Pair) -> None:
    contents = [b"a" * 100_000, b"b" * 300_000, b"c" * 10]
    pair.answer(list(map(encoded, contents)))
    views = [pair.exchange.next(time.monotonic() + 10) for _ in contents]
    first, second, third = (bytes(view) for view in views if isinstance(view, memoryview))
    assert first == contents[0]  # it has a buffer of its own: the second one did not fit
    assert third == contents[2]
    assert second[:10] == third


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"-OOM command not allowed\r\n", "OOM command not allowed"),
        (b"*2\r\n:1\r\n:1\r\n", "broke the protocol"),
        (b"$x\r\n", "broke the protocol"),
        (b"$\r\n", "broke the protocol"),
        (b"HTTP/1.1 400 Bad Request\r\n", "broke the protocol"),
        (b"x" * 9000, "broke the protocol"),
        (b"$3\r\nabcde\r\n", "another end"),
        (b"$99999999999\r\n", "announced a value of 99999999999 bytes"),
    ],
)
def test_what_is_no_answer_is_refused(pair: Pair, answer: bytes, message: str) -> None:
    pair.answer([answer])
    with pytest.raises(ConnectionError, match=message):
        pair.next()


@pytest.mark.parametrize("sent", [b"", b"$10", b"$10\r\nabc", b":1\r"])
def test_an_answer_that_ends_early_is_refused(pair: Pair, sent: bytes) -> None:
    pair.server.sendall(sent)
    pair.server.close()
    with pytest.raises(ConnectionError, match="has closed"):
        pair.next()


@pytest.mark.parametrize("sent", [b"", b"$10", b"$10\r\nabc"])
def test_an_answer_that_lags_is_waited_for_until_its_limit(pair: Pair, sent: bytes) -> None:
    pair.server.sendall(sent)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        pair.next(0.05)
    assert 0.04 < time.monotonic() - begun < 5
    with pytest.raises(TimeoutError, match="in time"):
        pair.next(-1.0)


def test_an_answer_that_trickles_does_not_move_the_limit(pair: Pair) -> None:
    stopped = threading.Event()

    def trickle() -> None:
        pair.server.sendall(b"$1000000\r\n")
        while not stopped.wait(0.01):
            pair.server.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        pair.next(0.2)
    assert time.monotonic() - begun < 5
    stopped.set()
    thread.join()


def test_a_server_that_takes_nothing_ends_the_sending(pair: Pair) -> None:
    with pytest.raises(TimeoutError):
        pair.exchange.send([bytes(1 << 22)] * 4, time.monotonic() + 0.1)
    pair.server.close()
    with pytest.raises(OSError):  # noqa: PT011 -- which one depends on the system
        pair.exchange.send([bytes(1 << 22)], time.monotonic() + 5)
