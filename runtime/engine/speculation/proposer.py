"""The interface of proposers: prompt lookup, draft model, draft head, forced tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..requests.request import Request

Tokens = npt.NDArray[np.int64]


class Proposer(Protocol):
    """Propose the next tokens of requests. A wrong proposal costs time and never changes the result.

    Attributes:
        max_tokens: maximum tokens of one proposal.
    """

    max_tokens: int

    def evidence(self, request: Request) -> int | None:
        """Return a small number that classifies the evidence for a proposal, None if there is none.

        The controller learns an acceptance rate for each number.
        """

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """Return the proposed tokens of each request, at most the given number.

        Called only for requests for which ``evidence`` has just returned a number.
        """

    def forget(self, request: Request) -> None:
        """Drop the state of an ended request."""

    def close(self) -> None:
        """Free all resources."""


@runtime_checkable
class StateReader(Protocol):
    """A proposer that reads the hidden states of the model's last layer."""

    def wants_states(self, request: Request, stop: int) -> bool:
        """Whether hidden states of a row that ends at ``stop`` are to be observed."""

    def observe(self, request: Request, start: int, states: npt.NDArray[np.float32]) -> None:
        """Keep the hidden states [n, hidden_size] of a request's tokens from ``start`` on."""
