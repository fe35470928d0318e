"""Context shift: when a context is full, keep the first tokens and the recent ones, drop the middle.

Xiao et al., Efficient Streaming Language Models with Attention Sinks (arXiv:2309.17453): a model needs the
first few tokens, on which attention rests, and the recent ones. There keys are re-rotated at every step; here
the kept tokens get new positions and are computed anew whenever the context is full, so that what follows is
exactly what the model says to "sinks + recent tokens", and costs about one more token computed for each one
generated.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UsageError
from .config import EngineConfig
from .kv_policy import KVPolicy, PolicyParts
from .requests.request import Request

_UNLIMITED = 2**31 - 1


class ContextShift(KVPolicy):
    """Makes room in contexts that are full.

    Raises:
        UsageError: nothing would be left to drop.
    """

    frees_windows = False

    def __init__(self, config: EngineConfig, parts: PolicyParts) -> None:
        super().__init__(config, parts)
        length, sinks = parts.max_length, config.attention_sinks
        if not 0 <= sinks <= length - 2:
            raise UsageError(
                f"attention_sinks is {sinks}; of a context of {length} tokens, {max(0, length - 2)} may stay"
            )
        self._recent = (length - sinks) // 2

    @classmethod
    def wanted(cls, config: EngineConfig) -> str | None:
        """See ``KVPolicy``."""
        return "context_shift" if config.context_shift else None

    def admit(self, request: Request, room: int) -> None:
        """Let a request go on beyond the context."""
        request.max_tokens = _UNLIMITED if request.max_tokens is None else request.max_tokens
        request.capacity = self._parts.max_length

    def after_step(self, requests: Sequence[Request]) -> None:
        """Drop the middle of those requests that are full and go on."""
        for request in requests:
            if request.slot is not None and request.num_tokens >= self._parts.max_length:
                request.drop_middle(self._config.attention_sinks, self._recent)
                self._parts.scheduler.restart(request)
                self._parts.speculator.forget(request)
