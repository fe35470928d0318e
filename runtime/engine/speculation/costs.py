"""Durations of steps with and without proposals, learned from measured steps."""

from __future__ import annotations

import bisect
from collections import deque

_REMEMBERED = 12  # measurements of each kind
_ENOUGH = 3  # plain steps; of one alone other work on the machine may have doubled the time
# Other work on the machine only adds time, so a low quantile estimates the cost of a step.
_QUANTILE = 0.3
_OUTLIER = 2.0  # time beyond this multiple of the expectation is not counted as a cost of proposals
# Costs in units (see ``_unit``): of a row with proposals, and the initial guess for each proposed token.
_ROW = 0.1
_TOKEN = 0.2
_MIN_TOKEN = 0.05  # smaller costs are below the measurement noise


class StepCosts:
    """Seconds of steps with decode rows only.

    The cost of a step with proposals is that of a plain step, a fixed cost for each row with proposals, and a
    cost for each proposed token. The last is learned for each proposer and number of rows.

    Args:
        batched: whether rows with proposals run together with the others, or each needs a run of its own.
    """

    def __init__(self, *, batched: bool) -> None:
        self._batched = batched
        self._recent: dict[int, deque[float]] = {}  # rows -> seconds of the last plain steps
        self._usual: dict[int, float] = {}  # their low quantile
        self._excesses: dict[
            int, deque[float]
        ] = {}  # added seconds of plain steps after steps with proposals
        self._excess: dict[int, float] = {}
        self._sizes: list[int] = []  # row counts of the measured plain steps, ascending
        self._shares: dict[tuple[object, int], deque[float]] = {}  # cost of a proposed token, in units
        self._share: dict[tuple[object, int], float] = {}

    def plain(self, rows: int) -> float | None:
        """Return the seconds of a plain step of ``rows`` rows; None until some were measured."""
        return self._usual.get(rows) if len(self._recent.get(rows, ())) >= _ENOUGH else None

    def observe_plain(self, rows: int, seconds: float, *, follows: bool = False) -> None:
        """Learn from a step without proposals; ``follows`` says that the previous step had proposals."""
        usual = self._usual.get(rows)
        if follows and usual is not None:
            excesses = self._excesses.setdefault(rows, deque(maxlen=_REMEMBERED))
            excesses.append(seconds - usual)
            self._excess[rows] = min(max(0.0, _low(excesses)), usual)
            return
        self._note_plain(rows, seconds)

    def transition(self, rows: int) -> float:
        """Return the added seconds of a plain step after one with proposals, since shapes change back."""
        return self._excess.get(rows, 0.0)

    def added(self, proposer: object, rows: int, lengthened: int, tokens: int) -> float:
        """Return the seconds that ``tokens`` proposals in ``lengthened`` of ``rows`` rows add to a step."""
        return self._without_tokens(rows, lengthened) + self.token(proposer, rows) * tokens - self._at(rows)

    def is_measured(self, proposer: object, rows: int) -> bool:
        """Whether the cost of a proposed token was measured."""
        return (proposer, rows) in self._share

    def token(self, proposer: object, rows: int) -> float:
        """Return the seconds that each proposed token costs."""
        return self._share.get((proposer, rows), _TOKEN) * self._unit(rows)

    def observe(self, proposer: object, rows: int, lengthened: int, tokens: int, seconds: float) -> float:
        """Learn from a step with proposals; return its seconds, limited to exclude outliers."""
        if seconds < self._usual.get(rows, 0.0):  # a plain step takes no longer than this: correct it
            self._note_plain(rows, seconds)
        expected = self.added(proposer, rows, lengthened, tokens) + self._at(rows)
        share = (seconds - self._without_tokens(rows, lengthened)) / tokens / self._unit(rows)
        shares = self._shares.setdefault((proposer, rows), deque([_TOKEN], maxlen=_REMEMBERED))
        shares.append(max(_MIN_TOKEN, share))
        self._share[proposer, rows] = _low(shares)
        return min(seconds, _OUTLIER * expected)

    def _note_plain(self, rows: int, seconds: float) -> None:
        recent = self._recent.setdefault(rows, deque(maxlen=_REMEMBERED))
        if not recent:
            bisect.insort(self._sizes, rows)
        recent.append(seconds)
        self._usual[rows] = _low(recent)

    def _without_tokens(self, rows: int, lengthened: int) -> float:
        """Return the seconds of a step with proposals, without the cost of the proposed tokens."""
        alone = _ROW if self._batched else 1.0 + _ROW
        return self._at(rows if self._batched else rows - lengthened) + alone * self._unit(rows) * lengthened

    def _unit(self, rows: int) -> float:
        """Return the unit of costs: a row's share of a plain step, or a run of one row if not batched."""
        return self._at(rows) / rows if self._batched else self._at(1)

    def _at(self, rows: int) -> float:
        """Return the seconds of a plain step of ``rows`` rows, or of the next larger measured size."""
        if rows == 0 or not self._sizes:
            return 0.0
        index = min(bisect.bisect_left(self._sizes, rows), len(self._sizes) - 1)
        return self._usual[self._sizes[index]]


def _low(values: deque[float]) -> float:
    return sorted(values)[int(_QUANTILE * len(values))]
