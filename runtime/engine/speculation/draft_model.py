"""Proposals by a draft model: a smaller model with the same vocabulary (arXiv:2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import numpy as np

from ....providers.base import Row, Runner
from ....records import dataclass
from ..requests.request import Request
from .proposer import Tokens
from .runner_proposer import RunnerProposer, draw_guesses


@dataclass(slots=True)
class _Followed:
    """The state of one request in the draft model.

    Args:
        slot: holds the draft model's KV of the request.
        known: how many of the request's tokens were run.
        guessed: the tokens proposed after these; all but the last were run too.
    """

    slot: int
    known: int = 0
    guessed: list[int] = field(default_factory=list)

    def held(self, request: Request) -> int:
        """Return for how many of the request's tokens the slot holds valid KV, at most all but the newest."""
        held, last = self.known, request.num_tokens - 1
        truth = request.token_slice(held, last).tolist() if held < last else []
        for guess, token in zip(self.guessed[:-1], truth, strict=False):
            if guess != token:
                break
            held += 1
        return min(held, last)


class DraftModel(RunnerProposer[_Followed]):
    """Propose the tokens that a draft model generates.

    For random sampling it uses the uniforms of the request itself: where both models agree on the
    probabilities, they sample the same token (compare arXiv:2408.07978).

    Args:
        runner: holds the draft model and its KV cache, with as many slots as the engine; closed here.
        max_tokens: maximum tokens of one proposal.
        max_step_tokens: maximum tokens of a request in one prefill step of the draft model.
    """

    name = "draft model"

    def __init__(self, runner: Runner, max_tokens: int = 8, max_step_tokens: int = 512) -> None:
        super().__init__(runner, max_tokens)
        self._max_step_tokens = max_step_tokens

    def evidence(self, request: Request) -> int | None:
        """Return 0 if the draft model can propose for the request, else None."""
        info, followed = self._runner.info, self._followed.get(request.request_id)
        if self._failed or request.num_tokens + self.max_tokens > info.context_length:
            return None
        known = followed.held(request) if followed is not None else 0
        return 0 if request.token_slice(known, request.num_tokens).max() < info.vocab_size else None

    def _propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """Return the model's tokens; none for requests whose prompt it has not computed yet."""
        for request, _ in wanted:
            self._follow(request, _Followed)
        guesses: list[list[int]] = [[] for _ in wanted]
        places = self._catch_up([request for request, _ in wanted], guesses)
        while places := [i for i in places if len(guesses[i]) < wanted[i][1]]:
            rows = []
            for i in places:
                request = wanted[i][0]
                position = request.num_tokens + len(guesses[i]) - 1
                token = np.array(guesses[i][-1:], np.int64)
                rows.append(Row(self._followed[request.request_id].slot, token, position))
            logits = self._runner.forward(rows)
            draw_guesses(
                [wanted[i][0] for i in places], [row[-1] for row in logits], [guesses[i] for i in places]
            )
        for (request, _), guessed in zip(wanted, guesses, strict=True):
            if guessed:
                followed = self._followed[request.request_id]
                followed.known, followed.guessed = request.num_tokens, guessed
        return [np.array(guessed, np.int64) for guessed in guesses]

    def _catch_up(self, requests: Sequence[Request], guesses: Sequence[list[int]]) -> list[int]:
        """Compute missing KV of all requests, and propose one token for those that missed little.

        Returns:
            The indices of the requests with a proposed token.
        """
        rows = []
        for request in requests:
            followed = self._followed[request.request_id]
            start = followed.held(request)
            stop = min(request.num_tokens, start + self._max_step_tokens)
            followed.known, followed.guessed = stop, []
            rows.append(Row(followed.slot, request.token_slice(start, stop), start))
        logits = self._runner.forward(rows)
        # Prefill would distort the measured cost of a proposal, so long rows propose nothing.
        ready = [i for i, row in enumerate(rows) if len(row.tokens) <= self.max_tokens + 1]
        draw_guesses(
            [requests[i] for i in ready], [logits[i][-1] for i in ready], [guesses[i] for i in ready]
        )
        return ready
