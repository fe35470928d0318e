"""Proposals by a head that reads the model's hidden states (multi-token prediction, EAGLE-3, assistants).

For token i it reads the model's hidden state and the embedding of token i + 1, and predicts token i + 2.
Further tokens it predicts from its own hidden states, so one head makes proposals of any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ....providers.base import Row, Runner
from ....records import dataclass
from ..requests.request import Request
from .proposer import Tokens
from .runner_proposer import RunnerProposer, draw_guesses

# The head reads so many tokens before its first proposal, and after a pause. It predicts near tokens, and the
# model's states sum up those before; more would make proposals wait.
_WINDOW = 64
# With fewer tokens before it, unless the text is shorter, a head guesses worse than it is used later.
_CONTEXT = 16

States = npt.NDArray[np.float32]


class HeadInputs(Protocol):
    """What a head reads, [n, width], for tokens of the model and for its own guesses.

    Attributes:
        advances: whether each guess takes a position of its own; else all are drafted at that of the first.
    """

    advances: bool

    def of_model(self, states: States) -> States:
        """Return what it reads for the model's hidden states [n, hidden_width]."""

    def of_head(self, before: States, own: States) -> States:
        """Return what it reads for a guess, after reading ``before`` [1, width] and giving ``own`` [1, m]."""


class LikeModel:
    """A head whose hidden states are like the model's (multi-token prediction)."""

    advances = True

    def of_model(self, states: States) -> States:
        """See ``HeadInputs``."""
        return states

    def of_head(self, before: States, own: States) -> States:
        """See ``HeadInputs``."""
        return own


@dataclass(frozen=True, slots=True)
class BesideModel:
    """A head that reads its own states beside those of the model's layers; one of both is zero (EAGLE-3).

    Args:
        own: columns of the head's states.
        skipped: columns of the model's hidden states in front of those of layers.
    """

    own: int
    skipped: int
    advances = True

    def of_model(self, states: States) -> States:
        """See ``HeadInputs``."""
        return np.pad(states[:, self.skipped :], ((0, 0), (self.own, 0)))

    def of_head(self, before: States, own: States) -> States:
        """See ``HeadInputs``."""
        return np.pad(own, ((0, 0), (0, before.shape[1] - self.own)))


class InPlaceOfModel:
    """A head whose states replace the model's last one, beside those of layers that stay (assistants)."""

    advances = False

    def of_model(self, states: States) -> States:
        """See ``HeadInputs``."""
        return states

    def of_head(self, before: States, own: States) -> States:
        """See ``HeadInputs``."""
        return np.concatenate([own, before[:, own.shape[1] :]], axis=1)


@dataclass(slots=True)
class _Followed:
    """What the head knows of a request.

    Args:
        slot: holds the head's KV.
        first: the position of the first token in that KV.
        held: the number of its tokens.
        pending: hidden states of the tokens behind these, each [n, hidden_size].
        waiting: the number of these tokens.
    """

    slot: int
    first: int
    held: int
    pending: list[States]
    waiting: int = 0

    @property
    def end(self) -> int:
        """The position behind the last known hidden state."""
        return self.first + self.held + self.waiting

    def take(self, start: int, states: States) -> None:
        """Add the hidden states of the tokens from ``start`` on, in place of known ones."""
        computed = self.first + self.held
        if start == self.end:
            self.pending.append(states)
        elif not self.first <= start < self.end:
            self.first, self.held, self.pending = start, 0, [states]
        elif start < computed:
            self.held, self.pending = start - self.first, [states]
        else:
            self.pending = [np.concatenate(self.pending)[: start - computed], states]
        self.waiting = sum(map(len, self.pending)) if len(self.pending) < 3 else self.waiting + len(states)
        if self.waiting > 2 * _WINDOW:  # not at each token
            last = np.concatenate(self.pending)[-_WINDOW:].copy()
            self.first, self.held, self.pending, self.waiting = self.end - _WINDOW, 0, [last], _WINDOW

    def read(self) -> States:
        """Return the pending states, which are held from now on."""
        states = self.pending[0] if len(self.pending) == 1 else np.concatenate(self.pending)
        self.held, self.pending, self.waiting = self.held + len(states), [], 0
        return states


class DraftHead(RunnerProposer[_Followed]):
    """Propose the tokens that a head of the model generates.

    For random sampling it uses the uniforms of the request itself, as ``DraftModel`` does.

    Args:
        runner: holds the head and its KV cache, with as many slots as the engine; closed here.
        max_tokens: maximum tokens of one proposal.
        inputs: what it reads; by default the head's states are like the model's.
        vocabulary: the token of the model that each of the head's tokens means; None if they are the same.
    """

    name = "draft head"

    def __init__(
        self,
        runner: Runner,
        max_tokens: int = 3,
        *,
        inputs: HeadInputs | None = None,
        vocabulary: Tokens | None = None,
    ) -> None:
        super().__init__(runner, max_tokens)
        self._inputs = inputs or LikeModel()
        self._vocabulary = vocabulary

    def wants_states(self, request: Request, stop: int) -> bool:
        """Whether hidden states of a row that ends at ``stop`` are to be observed."""
        return not self._failed and request.pooling is None and stop > request.num_tokens - _WINDOW

    def observe(self, request: Request, start: int, states: States) -> None:
        """Keep the hidden states [n, hidden_size] of a request's tokens from ``start`` on."""
        followed = self._follow(request, lambda slot: _Followed(slot, start, 0, []))
        followed.take(start, states)

    def evidence(self, request: Request) -> int | None:
        """Return 0 if the hidden states of the last tokens before the newest are known, else None."""
        followed = self._followed.get(request.request_id)
        if self._failed or followed is None or not followed.waiting or followed.end != request.num_tokens - 1:
            return None
        return 0 if followed.held + followed.waiting >= min(_CONTEXT, request.num_tokens - 1) else None

    def _propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        guesses: list[list[int]] = [[] for _ in wanted]
        rows = []
        for request, _ in wanted:
            followed = self._followed[request.request_id]
            start, read = followed.held, followed.read()
            tokens = request.token_slice(request.num_tokens - len(read), request.num_tokens)
            rows.append(Row(followed.slot, tokens, start, hidden_states=self._inputs.of_model(read)))
        self._guess(wanted, rows, guesses)
        last = dict(enumerate(rows))
        while places := [i for i in last if len(guesses[i]) < wanted[i][1]]:
            for i in places:
                last[i] = self._behind(last[i], guesses[i][-1])
            chosen = [wanted[i] for i in places], [last[i] for i in places]
            self._guess(*chosen, [guesses[i] for i in places])
        return [np.array(guessed, np.int64) for guessed in guesses]

    def _behind(self, before: Row, guess: int) -> Row:
        """Return the row of a guess, behind the row that gave it."""
        read, own = before.hidden_states, before.last_hidden_states
        assert read is not None and own is not None  # noqa: S101, PT018 -- set by ``_propose`` and ``_guess``
        end = before.start + len(before.tokens)
        states = self._inputs.of_head(read[-1:], own[-1:])
        start = end if self._inputs.advances else end - 1
        return Row(before.slot, np.array([guess], np.int64), start, hidden_states=states.copy())

    def _guess(
        self, wanted: Sequence[tuple[Request, int]], rows: Sequence[Row], guesses: Sequence[list[int]]
    ) -> None:
        """Run rows, and append a token to the guesses of each."""
        width = self._runner.info.hidden_width
        for row in rows:
            row.last_hidden_states = np.empty((len(row.tokens), width), np.float32)
        logits = self._runner.forward(rows)
        draw_guesses([request for request, _ in wanted], [row[-1] for row in logits], guesses)
        if self._vocabulary is not None:
            for guessed in guesses:
                guessed[-1] = int(self._vocabulary[guessed[-1]])
