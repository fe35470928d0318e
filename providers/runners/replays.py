"""Rows whose end may be rejected, on states that cannot be cut: what was accepted is computed again.

A state sums up all tokens of a row. If the text leaves the row before its end, the slot goes back to the
state before the row, and the accepted tokens are put in front of the slot's next row: one run computes both.
The kernels of states compute the same bits wherever a run is cut, so that changes no token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...records import dataclass
from ..base import Row
from ..image_rows import rope_positions

# A longer replay ends with a state of its own, at the cost of another run. Replays grow while every proposal
# is rejected in part, and each of their tokens costs about a tenth of a step.
_LONGEST = 12


@dataclass(frozen=True, slots=True)
class _Replay:
    """A row with proposals that a slot has run; its state before the row is kept."""

    start: int
    tokens: npt.NDArray[np.int64]
    hidden_states: npt.NDArray[np.float32] | None
    rope_positions: npt.NDArray[np.int64] | None

    def holds(self, length: int) -> bool:
        """Whether a text may go on after ``length`` tokens by a replay."""
        return self.start < length < self.start + len(self.tokens)


class Replays:
    """The last row with proposals of each slot."""

    def __init__(self) -> None:
        self._last: dict[int, _Replay] = {}

    def extended(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows that start at a state: with tokens to replay in front where theirs does not."""
        return [self._extended(row) if row.proposed or row.slot in self._last else row for row in rows]

    def ran(self, rows: Sequence[Row], extended: Sequence[Row]) -> None:
        """Remember the rows with proposals, as they were run, and fill the asked hidden states of all."""
        for row, run in zip(rows, extended, strict=True):
            if row is not run and row.last_hidden_states is not None and run.last_hidden_states is not None:
                row.last_hidden_states[:] = run.last_hidden_states[len(run.tokens) - len(row.tokens) :]
            if row.proposed:
                begin = max((n for n in run.checkpoints if run.start <= n <= row.start), default=run.start)
                self._last[row.slot] = _replay(run, begin)
            else:
                self._last.pop(row.slot, None)

    def state_before(self, slot: int, length: int) -> int:
        """Return the length at which a slot has the state from which that after ``length`` is computed."""
        last = self._last.get(slot)
        return last.start if last is not None and last.holds(length) else length

    def share(self, source: int, target: int, length: int) -> None:
        """Let a slot go on where another may."""
        last = self._last.get(source)
        self._last.pop(target, None)
        if last is not None and last.holds(length):
            self._last[target] = last

    def release(self, slot: int) -> None:
        """Forget the row of a slot."""
        self._last.pop(slot, None)

    def _extended(self, row: Row) -> Row:
        last = self._last.get(row.slot)
        checkpoints = [*row.checkpoints, row.start] if row.proposed and row.start else [*row.checkpoints]
        if last is None or not last.holds(row.start):
            return dataclasses.replace(row, checkpoints=checkpoints)
        count = row.start - last.start
        if count <= _LONGEST and row.start not in row.checkpoints:
            checkpoints = [*row.checkpoints]
        if row.proposed and last.start and row.start not in checkpoints:
            checkpoints.append(last.start)
        states = row.last_hidden_states
        total = count + len(row.tokens)
        positions = last.rope_positions
        if positions is not None:
            own = rope_positions([row], [row.start], len(positions))
            positions = np.concatenate([positions[:, :count], own], axis=1)
        hidden = last.hidden_states
        if hidden is not None and row.hidden_states is not None:
            hidden = np.concatenate([hidden[:count], row.hidden_states])
        return dataclasses.replace(
            row,
            tokens=np.concatenate([last.tokens[:count], row.tokens]),
            start=last.start,
            checkpoints=checkpoints,
            hidden_states=hidden,
            rope_positions=positions,
            last_hidden_states=None if states is None else np.empty((total, states.shape[1]), np.float32),
        )


def _replay(run: Row, begin: int) -> _Replay:
    skipped, positions = begin - run.start, run.rope_positions
    if positions is not None:
        positions = rope_positions([run], [run.start], len(positions))[:, skipped:]
    hidden = None if run.hidden_states is None else run.hidden_states[skipped:]
    return _Replay(begin, run.tokens[skipped:].copy(), hidden, positions)
