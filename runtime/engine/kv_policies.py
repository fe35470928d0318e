"""KV policies: all KV kept, KV evicted, a full context shifted, and the choice of one by the options."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...errors import ProviderRuntimeError, UsageError
from ...providers.base import KVEviction, Runner, RunnerInfo
from ...records import dataclass
from .config import EngineConfig
from .requests.request import Request
from .schedule.scheduler import Scheduler
from .speculation.speculator import Speculator


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParts:
    """The parts of an engine that a policy uses.

    Args:
        runner: holds the KV.
        scheduler: tracks requests and slots.
        speculator: must forget a request whose tokens change.
        max_length: maximum number of tokens of a sequence.
    """

    runner: Runner
    scheduler: Scheduler
    speculator: Speculator
    max_length: int


class KVPolicy:
    """Keep all KV of a request until it ends.

    Args:
        config: the engine's options.
        parts: the engine's parts.

    Raises:
        UsageError: the runner or another option excludes the policy.
    """

    # Whether KV behind sliding windows may be freed. False for policies that recompute kept tokens.
    frees_windows = True

    def __init__(self, config: EngineConfig, parts: PolicyParts) -> None:
        self._config = config
        self._parts = parts

    @classmethod
    def wanted(cls, config: EngineConfig) -> str | None:
        """Return the name of the option that asks for this policy, None if it is not set."""
        return None

    def admit(self, request: Request, room: int) -> None:
        """Limit ``max_tokens`` of a new request to ``room``, the tokens that the context leaves free."""
        request.max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)

    def before_run(self, requests: Sequence[Request]) -> set[int]:
        """Change the KV of a step's requests before they run; return slots that lost their content."""
        return set()

    def after_step(self, requests: Sequence[Request]) -> None:
        """Change a step's requests after their new tokens were appended."""


_log = logging.getLogger(__name__)

_SLACK = 4  # evict at 1 + 1/4 of the limit: this bounds the tokens copied per generated token


class KVEvictor(KVPolicy):
    """Evict KV of generating requests that exceed ``kv_eviction_tokens``.

    Raises:
        UsageError: the runner cannot evict KV, or ``kv_eviction_tokens`` is too small.
    """

    frees_windows = False

    def __init__(self, config: EngineConfig, parts: PolicyParts) -> None:
        super().__init__(config, parts)
        self._eviction = _eviction(config, parts.runner.info)
        self._most = self._eviction.kept + max(1, self._eviction.kept // _SLACK)

    @classmethod
    def wanted(cls, config: EngineConfig) -> str | None:
        return None if config.kv_eviction_tokens is None else "kv_eviction_tokens"

    def before_run(self, requests: Sequence[Request]) -> set[int]:
        """Evict KV of requests that generate and hold too much; return slots that lost their content."""
        runner, lost = self._parts.runner, set()
        for request in requests:
            held = request.num_computed - request.num_dropped
            generates = request.num_computed >= len(request.prompt_token_ids)
            if request.slot is None or not generates or held < self._most:
                continue
            try:
                runner.evict_kv(request.slot, request.num_computed, self._eviction)
            except ProviderRuntimeError as error:
                _log.warning(
                    "evicting KV of slot %d failed; the slot is computed again: %s", request.slot, error
                )
                lost.add(request.slot)
                continue
            self._parts.scheduler.drop(request, held - self._eviction.kept)
        return lost


def _eviction(config: EngineConfig, info: RunnerInfo) -> KVEviction:
    """Return the eviction settings, checked against the runner and the model.

    Raises:
        UsageError: the runner cannot evict KV, or ``kv_eviction_tokens`` is too small.
    """
    kept = config.kv_eviction_tokens or 0
    recent = kept // 2
    if not info.evicts_kv:
        raise UsageError(
            "this provider, or its KV cache type, cannot evict KV of single tokens; omit "
            "kv_eviction_tokens or choose another kv_cache_dtype"
        )
    if recent <= config.attention_sinks or recent < info.sliding_window:
        least = 2 * max(config.attention_sinks + 1, info.sliding_window)
        raise UsageError(
            f"kv_eviction_tokens is {kept}; this model and attention_sinks need at least {least}"
        )
    return KVEviction(kept, config.attention_sinks, recent)


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
