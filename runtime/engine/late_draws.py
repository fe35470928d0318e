"""Draws that wait for a grammar: their requests are set aside with their logits, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .requests.request import Request
from .sampling.sampler import BatchLogitsProcessor, Sample, sample
from .sampling.top_candidates import Row

PATIENCE = 0.01  # seconds that a step waits for grammars once the model has run


class LateDraws:
    """Requests whose grammar has not told in time what may come next; they keep slots and run nothing."""

    def __init__(self) -> None:
        self._logits: dict[Request, Row] = {}

    def set_aside(self, request: Request, logits: Row) -> None:
        """Draw from ``logits`` [vocab_size] later."""
        self._logits[request] = logits.copy()  # the next run overwrites the original

    def draw(
        self,
        processors: Sequence[BatchLogitsProcessor],
        take: Callable[[Request, Sample], None],
        *,
        patient: bool,
    ) -> list[Request]:
        """Draw for those whose grammars have told by now, and return them.

        Args:
            processors: change the logits of whole batches.
            take: gives a request its token.
            patient: wait a moment, as there is nothing else to do.
        """
        # One that ended is forgotten, and one that lost its slot is computed again and gets new logits.
        self._logits = {one: logits for one, logits in self._logits.items() if _waits(one)}
        until = time.monotonic() + (PATIENCE if patient else 0.0)
        ready = [request for request in self._logits if request.can_draw(until - time.monotonic())]
        logits = [self._logits.pop(request) for request in ready]
        samples = sample(logits, [request.sampling for request in ready], processors)
        for request, drawn in zip(ready, samples, strict=True):
            take(request, drawn)
        return ready


def _waits(request: Request) -> bool:
    return not request.finished and request.slot is not None and request.num_uncomputed == 0
