"""Context shift: when a context is full, keep the first tokens and the recent ones, drop the middle.

Xiao et al., Efficient Streaming Language Models with Attention Sinks (arXiv:2309.17453), keep the attention
sinks (the first few tokens) and the recent tokens. The paper rotates cached keys again at every step. Here
the kept tokens get new positions and are recomputed whenever the context is full. The output is therefore
exactly what the model gives for "sinks + recent tokens"; the cost is about one recomputed token for each
generated one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UsageError
from .config import EngineConfig
from .kv_policy import KVPolicy, PolicyParts
from .requests.request import Request

_UNLIMITED = 2**31 - 1


class ContextShift(KVPolicy):
    """Drop the middle of full contexts, so that requests go on.

    Raises:
        UsageError: ``attention_sinks`` leaves no token to drop.
    """

    frees_windows = False

    def __init__(self, config: EngineConfig, parts: PolicyParts) -> None:
        super().__init__(config, parts)
        length, sinks = parts.max_length, config.attention_sinks
        if not 0 <= sinks <= length - 2:
            raise UsageError(
                f"attention_sinks is {sinks}, but a context of {length} tokens allows at most "
                f"{max(0, length - 2)}"
            )
        self._recent = (length - sinks) // 2

    @classmethod
    def wanted(cls, config: EngineConfig) -> str | None:
        """See ``KVPolicy``."""
        return "context_shift" if config.context_shift else None

    def admit(self, request: Request, room: int) -> None:
        """Allow a request to generate beyond the context."""
        request.max_tokens = _UNLIMITED if request.max_tokens is None else request.max_tokens
        request.capacity = self._parts.max_length

    def after_step(self, requests: Sequence[Request]) -> None:
        """Drop the middle of the requests whose context is full."""
        for request in requests:
            if request.slot is not None and request.num_tokens >= self._parts.max_length:
                request.drop_middle(self._config.attention_sinks, self._recent)
                self._parts.scheduler.restart(request)
                self._parts.speculator.forget(request)
