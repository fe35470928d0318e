"""What steps cost with and without proposals, learned while they run."""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass

_REMEMBERED = 9  # steps whose median is the cost of a plain step
_DECAY = 0.95
# What a step took beyond these shares of its expectation is a disturbance, or is learned from the next ones.
_LEAST, _MOST = 0.5, 1.5
_PRIOR_ROW = 0.2  # of a plain step: the first guess of what a row and a proposed token cost
_PRIOR_TOKEN = 0.2
_PRIOR_WEIGHT = 0.3


@dataclass(slots=True)
class _Fit:
    """Least squares that forget: y = row * x0 + token * x1, drawn towards a first guess."""

    x00: float = 0.0
    x01: float = 0.0
    x11: float = 0.0
    x0y: float = 0.0
    x1y: float = 0.0

    def observe(self, x0: float, x1: float, y: float) -> None:
        self.x00 = _DECAY * self.x00 + x0 * x0
        self.x01 = _DECAY * self.x01 + x0 * x1
        self.x11 = _DECAY * self.x11 + x1 * x1
        self.x0y = _DECAY * self.x0y + x0 * y
        self.x1y = _DECAY * self.x1y + x1 * y

    def solve(self, guess0: float, guess1: float) -> tuple[float, float]:
        a, b, c = self.x00 + _PRIOR_WEIGHT, self.x01, self.x11 + _PRIOR_WEIGHT
        p, q = self.x0y + _PRIOR_WEIGHT * guess0, self.x1y + _PRIOR_WEIGHT * guess1
        determinant = a * c - b * b
        return max(0.0, (c * p - b * q) / determinant), max(0.0, (a * q - b * p) / determinant)


class StepCosts:
    """Seconds of steps that only decode, on this machine and at the present lengths.

    A step with proposals costs what its plain part costs, and so much for each row with a proposal and for
    each token proposed; both are learned for each proposer.

    Args:
        batched: whether rows with proposals share the others' run, or each needs a run of its own.
    """

    def __init__(self, *, batched: bool) -> None:
        self._batched = batched
        self._recent: dict[int, deque[float]] = {}  # rows -> seconds of the last plain steps
        self._median: dict[int, float] = {}
        self._sizes = [0]  # of the plain steps seen, in order
        self._fits: dict[object, _Fit] = {}

    def plain(self, rows: int) -> float | None:
        """Seconds of a step of so many rows and no proposals; None if it was never seen."""
        return self._median.get(rows)

    def observe_plain(self, rows: int, seconds: float) -> None:
        """Take note of a step without proposals."""
        recent = self._recent.setdefault(rows, deque(maxlen=_REMEMBERED))
        if not recent:
            bisect.insort(self._sizes, rows)
        recent.append(seconds)
        self._median[rows] = sorted(recent)[len(recent) // 2]

    def added(self, proposer: object, rows: int, lengthened: int, tokens: int) -> float:
        """Seconds that ``tokens`` proposed for ``lengthened`` of ``rows`` rows add to a plain step."""
        row, token = self.coefficients(proposer, rows)
        return self._shared_part(rows, lengthened) + row * lengthened + token * tokens - self._at(rows)

    def coefficients(self, proposer: object, rows: int) -> tuple[float, float]:
        """Seconds that each row with a proposal costs, and each token proposed."""
        unit = self._at(rows) if self._batched else self._at(1)
        run = 0.0 if self._batched else 1.0
        return self._fits.get(proposer, _Fit()).solve(unit * (run + _PRIOR_ROW), unit * _PRIOR_TOKEN)

    def observe(self, proposer: object, rows: int, lengthened: int, tokens: int, seconds: float) -> float:
        """Take note of a step with proposals; return its seconds, less what a disturbance added."""
        expected = self.added(proposer, rows, lengthened, tokens) + self._at(rows)
        seconds = min(max(seconds, _LEAST * expected), _MOST * expected)
        per_row = (seconds - self._shared_part(rows, lengthened)) / lengthened
        self._fits.setdefault(proposer, _Fit()).observe(1.0, tokens / lengthened, per_row)
        return seconds

    def _shared_part(self, rows: int, lengthened: int) -> float:
        """Seconds of the run that all rows share, or those without proposals."""
        return self._at(rows if self._batched else rows - lengthened)

    def _at(self, rows: int) -> float:
        """Seconds of a plain step of any number of rows, interpolated between those seen."""
        known = self._median.get(rows)
        if known is not None or rows == 0:
            return known or 0.0
        place = bisect.bisect(self._sizes, rows)
        low = self._sizes[place - 1]
        if place == len(self._sizes):
            return self._median.get(low, 0.0)
        high = self._sizes[place]
        share = (rows - low) / (high - low)
        return (1.0 - share) * self._median.get(low, 0.0) + share * self._median[high]
