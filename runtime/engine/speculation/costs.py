"""What steps cost with and without proposals, learned while they run."""

from __future__ import annotations

import bisect
from collections import deque

_REMEMBERED = 12  # steps of a kind
# Disturbances only add time, so that a low quantile tells what a step costs.
_QUANTILE = 0.3
_OUTLIER = 2.0  # what a step took beyond so many times its expectation is no cost of its proposals
# In units: what a row with proposals adds, and the first guess of what each token proposed adds.
_ROW = 0.1
_TOKEN = 0.2
_LEAST_TOKEN = 0.05  # less cannot be told from disturbances


class StepCosts:
    """Seconds of steps that only decode, on this machine and at the present lengths.

    A step with proposals costs what its plain part costs, and so much for each token proposed; the latter is
    learned for each proposer and number of rows.

    Args:
        batched: whether rows with proposals share the others' run, or each needs a run of its own.
    """

    def __init__(self, *, batched: bool) -> None:
        self._batched = batched
        self._recent: dict[int, deque[float]] = {}  # rows -> seconds of the last plain steps
        self._usual: dict[int, float] = {}
        self._excesses: dict[int, deque[float]] = {}  # seconds that plain steps after others took longer
        self._excess: dict[int, float] = {}
        self._sizes: list[int] = []  # of the plain steps seen, in order
        self._shares: dict[tuple[object, int], deque[float]] = {}  # what a token cost, in units
        self._share: dict[tuple[object, int], float] = {}

    def plain(self, rows: int) -> float | None:
        """Seconds of a step of so many rows and no proposals; None if it was never seen."""
        return self._usual.get(rows)

    def observe_plain(self, rows: int, seconds: float, *, follows: bool = False) -> None:
        """Take note of a step without proposals, and whether the one before it had some."""
        usual = self._usual.get(rows)
        if follows and usual is not None:
            excesses = self._excesses.setdefault(rows, deque(maxlen=_REMEMBERED))
            excesses.append(seconds - usual)
            self._excess[rows] = min(max(0.0, _low(excesses)), usual)
            return
        self._note_plain(rows, seconds)

    def aftermath(self, rows: int) -> float:
        """Seconds that a plain step takes longer after one with proposals, as shapes change back."""
        return self._excess.get(rows, 0.0)

    def added(self, proposer: object, rows: int, lengthened: int, tokens: int) -> float:
        """Seconds that ``tokens`` proposed for ``lengthened`` of ``rows`` rows add to a plain step."""
        return self._without_tokens(rows, lengthened) + self.token(proposer, rows) * tokens - self._at(rows)

    def token(self, proposer: object, rows: int) -> float:
        """Seconds that each token proposed costs."""
        return self._share.get((proposer, rows), _TOKEN) * self._unit(rows)

    def observe(self, proposer: object, rows: int, lengthened: int, tokens: int, seconds: float) -> float:
        """Take note of a step with proposals; return its seconds, less what a disturbance added."""
        if seconds < self._usual.get(rows, 0.0):  # plain steps, which take no longer, have become faster
            self._note_plain(rows, seconds)
        expected = self.added(proposer, rows, lengthened, tokens) + self._at(rows)
        share = (seconds - self._without_tokens(rows, lengthened)) / tokens / self._unit(rows)
        shares = self._shares.setdefault((proposer, rows), deque([_TOKEN], maxlen=_REMEMBERED))
        shares.append(max(_LEAST_TOKEN, share))
        self._share[proposer, rows] = _low(shares)
        return min(seconds, _OUTLIER * expected)

    def _note_plain(self, rows: int, seconds: float) -> None:
        recent = self._recent.setdefault(rows, deque(maxlen=_REMEMBERED))
        if not recent:
            bisect.insort(self._sizes, rows)
        recent.append(seconds)
        self._usual[rows] = _low(recent)

    def _without_tokens(self, rows: int, lengthened: int) -> float:
        """Seconds of a step with proposals, those for the tokens proposed aside."""
        alone = _ROW if self._batched else 1.0 + _ROW
        return self._at(rows if self._batched else rows - lengthened) + alone * self._unit(rows) * lengthened

    def _unit(self, rows: int) -> float:
        """What costs are told in: the part of a shared run that a row has, or a run of its own."""
        return self._at(rows) / rows if self._batched else self._at(1)

    def _at(self, rows: int) -> float:
        """Seconds of a plain step of any number of rows; of the next larger one seen, or else the largest."""
        if rows == 0 or not self._sizes:
            return 0.0
        place = min(bisect.bisect_left(self._sizes, rows), len(self._sizes) - 1)
        return self._usual[self._sizes[place]]


def _low(values: deque[float]) -> float:
    return sorted(values)[int(_QUANTILE * len(values))]
