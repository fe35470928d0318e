"""What proposers with a runner of their own have in common: slots for requests, failures, and draws."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ....errors import ProviderRuntimeError
from ....providers.base import Runner
from ..requests.request import Request
from ..sampling.random_sampling import sample_random
from .proposer import Tokens

_log = logging.getLogger(__name__)

_NO_TOKENS: Tokens = np.empty(0, np.int64)


class Followed(Protocol):
    """What a proposer knows of a request.

    Attributes:
        slot: holds the proposer's KV of the request.
    """

    slot: int


F = TypeVar("F", bound=Followed)


class RunnerProposer(ABC, Generic[F]):
    """Propose the tokens that a runner generates.

    Args:
        runner: holds the weights and a KV cache, with as many slots as the engine; closed here.
        max_tokens: maximum tokens of one proposal.

    Attributes:
        name: what it is, in the log.
    """

    name = "runner"

    def __init__(self, runner: Runner, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._runner = runner
        self._followed: OrderedDict[str, F] = OrderedDict()  # least recently used first
        self._free = list(reversed(range(runner.info.max_slots)))
        self._failed = False

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """Return tokens for each request, at most as many as are wanted; none if the runner fails."""
        try:
            return self._propose(wanted)
        except ProviderRuntimeError as error:
            _log.warning("the %s failed and is disabled: %s", self.name, error)
            self._failed = True
            return [_NO_TOKENS] * len(wanted)

    def forget(self, request: Request) -> None:
        """Free the request's slot."""
        followed = self._followed.pop(request.request_id, None)
        if followed is not None:
            self._runner.release(followed.slot)
            self._free.append(followed.slot)

    def close(self) -> None:
        """Close the runner."""
        self._followed.clear()
        self._runner.close()

    def _follow(self, request: Request, begin: Callable[[int], F]) -> F:
        """Return what is known of a request; ``begin`` makes it for a slot, if need be the oldest one's."""
        followed = self._followed.get(request.request_id)
        if followed is None:
            if not self._free:
                self._free.append(self._followed.popitem(last=False)[1].slot)
            followed = begin(self._free.pop())
            self._followed[request.request_id] = followed
        self._followed.move_to_end(request.request_id)
        return followed

    @abstractmethod
    def _propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """Return tokens for each request.

        Raises:
            ProviderRuntimeError: the runner fails.
        """


def draw_guesses(
    requests: Sequence[Request], logits: Sequence[npt.NDArray[np.float32]], guesses: Sequence[list[int]]
) -> None:
    """Sample one token for each request from logits [vocab_size], and append it to its guesses."""
    tokens = [int(row.argmax()) for row in logits]
    random = [i for i, request in enumerate(requests) if not request.params.greedy]
    if random:
        states = [requests[i].sampling for i in random]
        uniforms = np.array(
            [state.uniform(ahead=len(guesses[i])) for i, state in zip(random, states, strict=True)]
        )
        drawn = sample_random([logits[i] for i in random], [state.filters() for state in states], uniforms)
        for i, token in zip(random, drawn.token_ids.tolist(), strict=True):
            tokens[i] = token
    for guessed, token in zip(guesses, tokens, strict=True):
        guessed.append(token)
