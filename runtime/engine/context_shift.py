"""Context shift: when a context is full, keep the first tokens and the recent ones, drop the middle.

Xiao et al., Efficient Streaming Language Models with Attention Sinks (arXiv:2309.17453): a model needs the
first few tokens, on which attention rests, and the recent ones. There keys are re-rotated at every step; here
the kept tokens get new positions and are computed anew whenever the context is full, so that what follows is
exactly what the model says to "sinks + recent tokens", and costs about one more token computed for each one
generated.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import UsageError
from .requests.request import Request
from .schedule.scheduler import Scheduler
from .speculation.speculator import Speculator


class ContextShift:
    """Makes room in contexts that are full.

    Args:
        length: tokens of a full context.
        sinks: how many of the first tokens stay.
        scheduler: keeps the books of the requests.
        speculator: knows the requests' tokens too.

    Raises:
        UsageError: nothing would be left to drop.
    """

    def __init__(self, length: int, sinks: int, scheduler: Scheduler, speculator: Speculator) -> None:
        if not 0 <= sinks <= length - 2:
            raise UsageError(
                f"attention_sinks is {sinks}; of a context of {length} tokens, {max(0, length - 2)} may stay"
            )
        self._length = length
        self._sinks = sinks
        self._recent = (length - sinks) // 2
        self._scheduler = scheduler
        self._speculator = speculator

    def apply(self, requests: Iterable[Request]) -> None:
        """Drop the middle of those requests that are full and go on."""
        for request in requests:
            if request.slot is not None and request.num_tokens >= self._length:
                request.drop_middle(self._sinks, self._recent)
                self._scheduler.restart(request)
                self._speculator.forget(request)
