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
# Of a prompt, the head reads the last tokens only: it predicts near ones, and a long prompt would wait.
_WINDOW = 512

States = npt.NDArray[np.float32]


@dataclass(slots=True)
class _Followed:
    """What the head knows of a request.

    Args:
        slot: holds the head's KV.
        first: the position of the first token in that KV.
        held: the number of its tokens.
        pending: hidden states of the tokens behind these, [n, hidden_size].
    """

    slot: int
    first: int
    held: int
    pending: States

    @property
    def end(self) -> int:
        """The position behind the last known hidden state."""
        return self.first + self.held + len(self.pending)

    def take(self, start: int, states: States) -> None:
        """Add the hidden states of the tokens from ``start`` on, in place of known ones."""
        computed = self.first + self.held
        if not self.first <= start <= self.end:
            self.first, self.held, self.pending = start, 0, states
        elif start < computed:
            self.held, self.pending = start - self.first, states
        else:
            self.pending = np.concatenate([self.pending[: start - computed], states])
        if len(self.pending) > _WINDOW:
            self.first, self.held, self.pending = self.end - _WINDOW, 0, self.pending[-_WINDOW:]


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
            followed = _Followed(self._free.pop(), start, 0, states[:0])
            self._followed[request.request_id] = followed
        self._followed.move_to_end(request.request_id)
        followed.take(start, states)

    def evidence(self, request: Request) -> int | None:
        """Return 0 if the hidden states of all tokens but the newest are known, else None."""
        followed = self._followed.get(request.request_id)
        known = followed is not None and followed.end == request.num_tokens - 1 and len(followed.pending)
        return 0 if known and not self._failed else None

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """Return the head's tokens; none for requests of whose prompt much was still to be read."""
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
            tokens = request.token_slice(request.num_tokens - len(followed.pending), request.num_tokens)
            rows.append(Row(followed.slot, tokens, followed.held, hidden_states=followed.pending))
        # Reading a prompt would distort the measured cost of a proposal, so long rows propose nothing.
        ready = [i for i, row in enumerate(rows) if len(row.tokens) <= self.max_tokens + 1]
        self._guess(wanted, rows, ready, guesses)
        for request, _ in wanted:
            followed = self._followed[request.request_id]
            followed.held += len(followed.pending)
            followed.pending = followed.pending[:0]
        places = ready
        last = {i: rows[i] for i in places}
        while places := [i for i in places if len(guesses[i]) < wanted[i][1]]:
            for i in places:
                before, token = last[i], np.array(guesses[i][-1:], np.int64)
                states = before.last_hidden_states
                assert states is not None  # noqa: S101 -- asked for by ``_guess``
                last[i] = Row(
                    before.slot, token, before.start + len(before.tokens), hidden_states=states[-1:].copy()
                )
            chosen = [wanted[i] for i in places], [last[i] for i in places], range(len(places))
            self._guess(*chosen, [guesses[i] for i in places])
        return [np.array(guessed, np.int64) for guessed in guesses]

    def _guess(
        self,
        wanted: Sequence[tuple[Request, int]],
        rows: Sequence[Row],
        ready: Sequence[int],
        guesses: Sequence[list[int]],
    ) -> None:
        """Run rows, and append a token to the guesses of those at ``ready``."""
        width = self._runner.info.embedding_size
        for i, row in enumerate(rows):
            row.num_logits = int(i in ready)
            row.last_hidden_states = np.empty((len(row.tokens), width), np.float32)
        logits = self._runner.forward(rows)
        requests = [wanted[i][0] for i in ready]
        draw_guesses(requests, [logits[i][-1] for i in ready], [guesses[i] for i in ready])
