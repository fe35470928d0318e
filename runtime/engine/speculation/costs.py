"""What steps cost with and without proposals, learned while they run."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

_REMEMBERED = 9  # steps whose median is the cost of a plain step
_DECAY = 0.95
_OUTLIER = 3.0  # a step that took longer than so many times its expectation was disturbed
_PRIOR_ROW = 0.2  # of a plain step: the first guess of what a row and a proposed token cost
_PRIOR_TOKEN = 0.2
_PRIOR_WEIGHT = 0.1


class StepCosts:
    """Seconds of steps that only decode, on this machine and at the present lengths.

    A step with proposals costs what its plain part costs, and so much for each row with a proposal and for
    each token proposed: two coefficients for each proposer, by least squares that forget.

    Args:
        batched: whether rows with proposals share the others' run, or each needs a run of its own.
    """

    def __init__(self, *, batched: bool) -> None:
        self._batched = batched
        self._plain: dict[int, deque[float]] = {}
        self._normal: dict[object, npt.NDArray[np.float64]] = {}  # proposer -> [2, 3]: x x' and x y

    def plain(self, rows: int) -> float | None:
        """Seconds of a step of so many rows and no proposals; None if it was never seen."""
        seen = self._plain.get(rows)
        return None if seen is None else sorted(seen)[len(seen) // 2]

    def observe_plain(self, rows: int, seconds: float) -> None:
        """Take note of a step without proposals."""
        self._plain.setdefault(rows, deque(maxlen=_REMEMBERED)).append(seconds)

    def extra(self, proposer: object, rows: int, lengthened: int, tokens: int) -> float:
        """Seconds that ``tokens`` proposed for ``lengthened`` of ``rows`` rows add to a plain step."""
        row, token = self.coefficients(proposer, rows)
        return self._shared_part(rows, lengthened) + row * lengthened + token * tokens - self._at(rows)

    def coefficients(self, proposer: object, rows: int) -> tuple[float, float]:
        """Seconds that each row with a proposal costs, and each token proposed."""
        unit = self._at(rows) if self._batched else self._at(1)
        prior = np.array([0.0 if self._batched else 1.0, 0.0]) + [_PRIOR_ROW, _PRIOR_TOKEN]
        normal = self._normal.get(proposer, np.zeros((2, 3)))
        matrix = normal[:, :2] + _PRIOR_WEIGHT * np.eye(2)
        row, token = np.linalg.solve(matrix, normal[:, 2] + _PRIOR_WEIGHT * unit * prior)
        return max(0.0, float(row)), max(0.0, float(token))

    def observe(self, proposer: object, rows: int, lengthened: int, tokens: int, seconds: float) -> float:
        """Take note of a step with proposals; return its seconds, less what a disturbance added."""
        expected = self.extra(proposer, rows, lengthened, tokens) + self._at(rows)
        seconds = min(seconds, _OUTLIER * expected)
        x = np.array([lengthened, tokens, seconds - self._shared_part(rows, lengthened)]) / lengthened
        normal = self._normal.get(proposer, np.zeros((2, 3)))
        self._normal[proposer] = _DECAY * normal + np.outer(x[:2], x)
        return seconds

    def _shared_part(self, rows: int, lengthened: int) -> float:
        """Seconds of the run that all rows share, or those without proposals."""
        return self._at(rows if self._batched else rows - lengthened)

    def _at(self, rows: int) -> float:
        """Seconds of a plain step of any number of rows, interpolated."""
        known = self.plain(rows)
        if known is not None:
            return known
        sizes = sorted(self._plain)
        return float(np.interp(rows, [0, *sizes], [0.0, *(self.plain(size) or 0.0 for size in sizes)]))
