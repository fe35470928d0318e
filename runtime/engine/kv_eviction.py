"""KV eviction: limit the KV cache of a generating request. Lossy.

Whenever the cache of a generating request exceeds the limit by a quarter, it is cut to the limit. Kept are
the attention sinks (the first tokens, arXiv:2309.17453), the recent half, and the most important of the other
tokens, which the runner selects. Prompts are computed in full, as in SnapKV (arXiv:2404.14469); other
requests may share their KV until the first eviction.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...errors import ProviderRuntimeError, UsageError
from ...providers.base import KVEviction, RunnerInfo
from .config import EngineConfig
from .kv_policy import KVPolicy, PolicyParts
from .requests.request import Request

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
        """See ``KVPolicy``."""
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
