"""KV policies: the choice of one by the options, and the shift of a context that is full."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UsageError
from .config import EngineConfig
from .kv_eviction import KVEvictor
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


POLICIES: tuple[type[KVPolicy], ...] = (KVEvictor, ContextShift)


def chosen_policy(config: EngineConfig) -> type[KVPolicy]:
    """Return the policy that the options ask for, by default ``KVPolicy``, which keeps all KV.

    Raises:
        UsageError: the options ask for two policies.
    """
    wanted = [(policy, option) for policy in POLICIES if (option := policy.wanted(config)) is not None]
    if len(wanted) > 1:
        raise UsageError(f"{' and '.join(option for _, option in wanted)} both drop tokens; choose one")
    return wanted[0][0] if wanted else KVPolicy
