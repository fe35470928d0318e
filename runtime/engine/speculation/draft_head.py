"""Proposals by a head of the model, which reads the model's last hidden states (multi-token prediction).

For token i it reads the model's hidden state and the embedding of token i + 1, and predicts token i + 2.
Further tokens it predicts from its own hidden states, so one head makes proposals of any length.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....errors import ProviderRuntimeError
from ....providers.base import Row, Runner
from ..requests.request import Request
from .draft_model import draw_guesses
from .proposer import Tokens

_log = logging.getLogger(__name__)

_NO_TOKENS: Tokens = np.empty(0, np.int64)
# The head reads so many tokens before its first proposal, and after a pause. It predicts near tokens, and the
# model's states sum up those before; more would make proposals wait.
_WINDOW = 64
# With fewer tokens before it, unless the text is shorter, a head guesses worse than it is used later.
_CONTEXT = 16

States = npt.NDArray[np.float32]


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


class DraftHead:
    """Propose the tokens that a head of the model generates.

    For random sampling it uses the uniforms of the request itself, as ``DraftModel`` does.

    Args:
        runner: holds the head and its KV cache, with as many slots as the engine; closed here.
        max_tokens: maximum tokens of one proposal.
    """

    def __init__(self, runner: Runner, max_tokens: int = 3) -> None:
        self.max_tokens = max_tokens
        self._runner = runner
        self._followed: OrderedDict[str, _Followed] = OrderedDict()  # least recently used first
        self._free = list(reversed(range(runner.info.max_slots)))
        self._failed = False

    def wants_states(self, request: Request, stop: int) -> bool:
        """Whether hidden states of a row that ends at ``stop`` are to be observed."""
        return not self._failed and request.pooling is None and stop > request.num_tokens - _WINDOW

    def observe(self, request: Request, start: int, states: States) -> None:
        """Keep the hidden states [n, hidden_size] of a request's tokens from ``start`` on."""
        followed = self._followed.get(request.request_id)
        if followed is None:
            if not self._free:
                self._free.append(self._followed.popitem(last=False)[1].slot)
            followed = _Followed(self._free.pop(), start, 0, [])
            self._followed[request.request_id] = followed
        self._followed.move_to_end(request.request_id)
        followed.take(start, states)

    def evidence(self, request: Request) -> int | None:
        """Return 0 if the hidden states of the last tokens before the newest are known, else None."""
        followed = self._followed.get(request.request_id)
        if self._failed or followed is None or not followed.waiting or followed.end != request.num_tokens - 1:
            return None
        return 0 if followed.held + followed.waiting >= min(_CONTEXT, request.num_tokens - 1) else None

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """Return the head's tokens; none if it fails."""
        try:
            return self._propose(wanted)
        except ProviderRuntimeError as error:
            _log.warning("the draft head failed and is disabled: %s", error)
            self._failed = True
            return [_NO_TOKENS] * len(wanted)

    def forget(self, request: Request) -> None:
        """Free the request's slot."""
        followed = self._followed.pop(request.request_id, None)
        if followed is not None:
            self._runner.release(followed.slot)
            self._free.append(followed.slot)

    def close(self) -> None:
        """Close the head's runner."""
        self._followed.clear()
        self._runner.close()

    def _propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        guesses: list[list[int]] = [[] for _ in wanted]
        rows = []
        for request, _ in wanted:
            followed = self._followed[request.request_id]
            start, read = followed.held, followed.read()
            tokens = request.token_slice(request.num_tokens - len(read), request.num_tokens)
            rows.append(Row(followed.slot, tokens, start, hidden_states=read))
        self._guess(wanted, rows, guesses)
        last = dict(enumerate(rows))
        while places := [i for i in last if len(guesses[i]) < wanted[i][1]]:
            for i in places:
                before, token = last[i], np.array(guesses[i][-1:], np.int64)
                states = before.last_hidden_states
                assert states is not None  # noqa: S101 -- asked for by ``_guess``
                last[i] = Row(
                    before.slot, token, before.start + len(before.tokens), hidden_states=states[-1:].copy()
                )
            chosen = [wanted[i] for i in places], [last[i] for i in places]
            self._guess(*chosen, [guesses[i] for i in places])
        return [np.array(guessed, np.int64) for guessed in guesses]

    def _guess(
        self, wanted: Sequence[tuple[Request, int]], rows: Sequence[Row], guesses: Sequence[list[int]]
    ) -> None:
        """Run rows, and append a token to the guesses of each."""
        width = self._runner.info.embedding_size
        for row in rows:
            row.last_hidden_states = np.empty((len(row.tokens), width), np.float32)
        logits = self._runner.forward(rows)
        draw_guesses([request for request, _ in wanted], [row[-1] for row in logits], guesses)
