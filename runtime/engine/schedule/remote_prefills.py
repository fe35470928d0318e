"""Requests whose prompt a prefill server computes, while others run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from ....records import dataclass
from ...process.backoff import Backoff
from ..requests.chunk import CHUNK_TOKENS
from ..requests.prefill_client import ForeignModelError, PrefillClient
from ..requests.request import Request

_log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.01
# Seconds that a chunk is waited for, until the cost of computing one is known.
_PATIENCE = 0.1
_WEIGHT = 0.2  # of the newest prompt in the moving average of the server's cost
_LATE = 1.5  # a late prompt would have taken longer than it was waited for
_DECAY = 0.97  # of the average at each prompt that is not sent, so that the server is tried again


@dataclass(slots=True)
class PrefillCounters:
    """Running totals; see ``EngineStats``."""

    prefills_remote: int = 0
    prefills_late: int = 0
    prefills_failed: int = 0
    prefills_foreign: int = 0
    prefills_skipped: int = 0


@dataclass(frozen=True, slots=True)
class _Awaited:
    """The work on a prompt: its end, its tokens, and when its request began and stops to wait for it."""

    end: Future[None]
    tokens: int
    begun: float
    deadline: float


class RemotePrefills:
    """Hold requests until a prefill server has written the KV of their prompts, or is late or away.

    A request waits no longer than computing its prompt here would take, beside what runs here. If the server
    was measured to be slower than that, prompts are computed here; now and then one is sent to measure again.
    After a failure the server is left alone for a while.

    Args:
        client: the prefill server; None computes every prompt here.
        least: prompts with fewer tokens to compute are computed here.
        local_seconds: returns the seconds to compute so many tokens here; None if that is not known yet.
        clock: returns seconds.
    """

    def __init__(
        self,
        client: PrefillClient | None,
        least: int,
        local_seconds: Callable[[int], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = PrefillCounters()
        self._client = client
        self._least = least
        self._local_seconds = local_seconds
        self._seconds_per_token = 0.0  # of the server
        self._clock = clock
        self._backoff = Backoff(clock)
        self.waiting: dict[Request, _Awaited] = {}

    @property
    def queued_tokens(self) -> int:
        """The prompt tokens that are not computed here yet."""
        return sum(request.queued_tokens for request in self.waiting)

    def add(self, request: Request) -> bool:
        """Send the prompt of a new request away; return False if it is to be computed here.

        Further samples of a prompt wait with the first one.
        """
        if self._client is None:
            return False
        for first, awaited in self.waiting.items():
            if first.request_id == request.first_sample:
                self.waiting[request] = awaited
                return True
        if request.queued_tokens < self._least or not _movable(request):
            return False
        if self._backoff.paused:
            self.counters.prefills_skipped += 1
            return False
        tokens = request.queued_tokens
        seconds = self._local_seconds(tokens)
        if seconds is None:
            seconds = _PATIENCE * tokens / CHUNK_TOKENS
        elif self._seconds_per_token * tokens > seconds:
            self._seconds_per_token *= _DECAY
            self.counters.prefills_skipped += 1
            return False
        now = self._clock()
        end = self._client.begin(request.prompt_token_ids, request.cache_salt, seconds)
        self.waiting[request] = _Awaited(end, tokens, now, now + seconds)
        return True

    def discard(self, request: Request) -> bool:
        """Remove a request; return False if it was not waiting here."""
        return self.waiting.pop(request, None) is not None

    def pause(self) -> None:
        """Block until a prompt is there, at most 10 ms."""
        wait([awaited.end for awaited in self.waiting.values()], _PAUSE_SECONDS, FIRST_COMPLETED)

    def take(self) -> list[Request]:
        """Remove and return the requests that wait no longer."""
        ready = list[Request]()
        ended = set[Future[None]]()  # samples of a prompt share one
        now = self._clock()
        for request, awaited in list(self.waiting.items()):
            if not awaited.end.done() and now < awaited.deadline:
                continue
            if awaited.end not in ended:
                ended.add(awaited.end)
                self._count(awaited, now)
            del self.waiting[request]
            request.stored = None  # the tiers may have more now
            ready.append(request)
        return ready

    def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            self._client.close()

    def _count(self, awaited: _Awaited, now: float) -> None:
        """Count how the work on a prompt ended, learn how long it took, and pause after a failure."""
        error = TimeoutError("it is late") if not awaited.end.done() else awaited.end.exception()
        cost = (now - awaited.begun) / awaited.tokens
        if error is None:
            self.counters.prefills_remote += 1
            self._backoff.succeeded()
            self._seconds_per_token += _WEIGHT * (cost - self._seconds_per_token)
            return
        if isinstance(error, TimeoutError):
            self.counters.prefills_late += 1
            self._seconds_per_token = max(self._seconds_per_token, _LATE * cost)
            return
        if isinstance(error, ForeignModelError):
            self.counters.prefills_foreign += 1
        else:
            self.counters.prefills_failed += 1
        seconds = self._backoff.failed()
        kind = type(error).__name__
        _log.warning("the prefill server is not asked for %.0f s: %s: %s", seconds, kind, error)


def _movable(request: Request) -> bool:
    """Whether KV of a request's tokens is all that its prompt leaves, and the server has what it needs."""
    plain = request.images is None and request.adapter is None
    return plain and request.usable_prefix >= request.num_tokens - 1 and not request.observes_prompt
