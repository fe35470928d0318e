"""The caller of a request, and the budgets of its API key."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import field

from ....errors import RateLimitError
from ....records import dataclass

_MINUTE, _DAY = 60.0, 86400.0


class Bucket:
    """A token bucket: holds at most ``capacity`` units and refills evenly within ``seconds``.

    Args:
        capacity: the units of a full bucket; a new bucket is full.
        seconds: the time in which an empty bucket becomes full.
        clock: returns the time in seconds.
    """

    def __init__(self, capacity: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity, self._per_second, self._clock = capacity, capacity / seconds, clock
        self._level, self._at = float(capacity), clock()

    def wait(self) -> float:
        """Return the seconds until the bucket holds 1 unit; 0 if it holds one now."""
        self._refill()
        return max(0.0, (1.0 - self._level) / self._per_second)

    def take(self, units: int) -> None:
        """Remove units; the level may become negative."""
        self._refill()
        self._level -= units

    def take_over(self, before: Bucket) -> None:
        """Take over what is left in a bucket that this one replaces, and add what the capacity grew by."""
        before._refill()
        self._level = min(self.capacity, before._level + max(0, self.capacity - before.capacity))

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self.capacity, self._level + (now - self._at) * self._per_second)
        self._at = now


class Budgets:
    """The limits of one API key. They start full when the service starts.

    Args:
        requests_per_minute: requests; None is no limit.
        tokens_per_minute: tokens of prompts and answers; None is no limit.
        tokens_per_day: tokens of prompts and answers; None is no limit.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        tokens_per_day: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        def buckets(limits: dict[str, tuple[int | None, float]]) -> dict[str, Bucket]:
            return {
                unit: Bucket(limit, seconds, clock)
                for unit, (limit, seconds) in limits.items()
                if limit is not None
            }

        self._requests = buckets({"requests a minute": (requests_per_minute, _MINUTE)})
        self._tokens = buckets(
            {"tokens a minute": (tokens_per_minute, _MINUTE), "tokens a day": (tokens_per_day, _DAY)}
        )

    def change_to(self, other: Budgets) -> None:
        """Take over the limits of others; what is used of a limit that both have stays used."""
        for new, old in ((other._requests, self._requests), (other._tokens, self._tokens)):
            for unit in new.keys() & old.keys():
                new[unit].take_over(old[unit])
        self._requests, self._tokens = other._requests, other._tokens

    @property
    def counts_tokens(self) -> bool:
        """Return whether tokens are limited."""
        return bool(self._tokens)

    def count_request(self) -> None:
        """Count one request.

        Raises:
            RateLimitError: the requests of this minute are used up.
        """
        _check(self._requests)
        for bucket in self._requests.values():
            bucket.take(1)

    def check_tokens(self) -> None:
        """Check that tokens are left. A request may use more than are left; later ones wait for the refill.

        Raises:
            RateLimitError: the tokens are used up.
        """
        _check(self._tokens)

    def spend(self, tokens: int) -> None:
        """Count tokens of a prompt or an answer."""
        for bucket in self._tokens.values():
            bucket.take(tokens)


def _check(buckets: dict[str, Bucket]) -> None:
    for unit, bucket in buckets.items():
        if wait := bucket.wait():
            error = RateLimitError(
                f"this API key allows {bucket.capacity} {unit}, and they are used up; retry later"
            )
            error.retry_after = wait
            raise error


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of the API key that a request has.

    Args:
        name: the key's name in the file.
        models: the models that the caller may use; empty allows all.
        admin: whether the caller may load and unload models.
        budgets: the limits of the key.
    """

    name: str
    models: tuple[str, ...] = ()
    admin: bool = False
    budgets: Budgets = field(default_factory=Budgets, compare=False)

    def may_use(self, model: str) -> bool:
        """Return whether the caller may use a model."""
        return not self.models or model in self.models


# The caller of the current request; None if the service has no API keys.
CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def caller_name() -> str | None:
    """Return the name of the API key of the current request; None if keys are off."""
    caller = CALLER.get()
    return None if caller is None else caller.name


def check_tokens() -> None:
    """Check the token budgets of the current caller; see ``Budgets.check_tokens``."""
    caller = CALLER.get()
    if caller is not None:
        caller.budgets.check_tokens()


def spend(tokens: int) -> None:
    """Count tokens for the current caller."""
    caller = CALLER.get()
    if caller is not None:
        caller.budgets.spend(tokens)
