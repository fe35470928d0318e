"""What may propose tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..requests.request import Request

Tokens = npt.NDArray[np.int64]


class Proposer(Protocol):
    """Guesses how requests go on. A wrong guess costs time, never the result.

    Attributes:
        max_tokens: most tokens of one proposal.
    """

    max_tokens: int

    def evidence(self, request: Request) -> int | None:
        """How well founded a proposal would be, None if there is none.

        The success of each of these small numbers is learned.
        """

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """Per request, the tokens that may follow, at most so many; only where there is evidence."""

    def forget(self, request: Request) -> None:
        """The request has ended."""

    def close(self) -> None:
        """Free everything."""
