"""Requests that wait for the mask of their grammar while the other requests go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .requests.request import Request
from .sampling.sampler import BatchLogitsProcessor, Sample, sample
from .sampling.top_candidates import Row

PATIENCE = 0.01  # seconds that a step waits for masks after the model has run


class LateDraws:
    """Requests whose grammar had no mask in time. They keep their slots and have no rows in a step."""

    def __init__(self) -> None:
        self._logits: dict[Request, Row] = {}

    def set_aside(self, request: Request, logits: Row) -> None:
        """Keep ``logits`` [vocab_size] to sample from later."""
        self._logits[request] = logits.copy()  # the next run overwrites the original

    def draw(
        self,
        processors: Sequence[BatchLogitsProcessor],
        take: Callable[[Request, Sample], None],
        *,
        patient: bool,
    ) -> list[Request]:
        """Sample for the requests whose masks are ready, and return these requests.

        Args:
            processors: change the logits of whole batches.
            take: appends a token to its request.
            patient: wait up to 10 ms, because no row runs.
        """
        if not self._logits:
            return []
        # A finished request is forgotten. A request without a slot is computed again and gets new logits.
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
