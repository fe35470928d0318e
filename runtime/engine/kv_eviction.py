"""KV eviction: a bounded cache for long answers. It is lossy.

While a request generates, its cache is cut down to a number of tokens whenever it holds a quarter more. What
stays are the attention sinks (the first tokens, arXiv:2309.17453), the recent half, and of the others those
that the runner finds most important. Prompts are read whole, as in SnapKV (arXiv:2404.14469), and other
requests may share their KV until the first eviction.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

from ...errors import ProviderRuntimeError, UsageError
from ...providers.base import EvictingRunner, KVEviction, RunnerInfo
from .config import EngineConfig
from .kv_policy import KVPolicy, PolicyParts
from .requests.request import Request

_log = logging.getLogger(__name__)

_SLACK = 4  # a quarter more before the next time, so that few tokens are copied for each that is generated


class KVEvictor(KVPolicy):
    """Drops KV of requests that hold much.

    Raises:
        UsageError: the runner cannot drop KV, or what is to be kept is too little.
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
        """Evict from those that generate and hold too much; return slots whose content was lost by it."""
        runner, lost = cast(EvictingRunner, self._parts.runner), set()
        for request in requests:
            held = request.num_computed - request.num_dropped
            generates = request.num_computed >= len(request.prompt_token_ids)
            if request.slot is None or not generates or held < self._most:
                continue
            try:
                runner.evict_kv(request.slot, request.num_computed, self._eviction)
            except ProviderRuntimeError as error:
                _log.warning(
                    "slot %d could not have KV evicted, it is computed again: %s", request.slot, error
                )
                lost.add(request.slot)
                continue
            self._parts.scheduler.drop(request, held - self._eviction.kept)
        return lost


def _eviction(config: EngineConfig, info: RunnerInfo) -> KVEviction:
    """What stays."""
    kept = config.kv_eviction_tokens or 0
    recent = kept // 2
    if not info.evicts_kv:
        raise UsageError(
            "this provider, or its type of KV cache, cannot evict KV of single tokens; leave "
            "kv_eviction_tokens out or choose another kv_cache_dtype"
        )
    if recent <= config.attention_sinks or recent < info.sliding_window:
        least = 2 * max(config.attention_sinks + 1, info.sliding_window)
        raise UsageError(
            f"kv_eviction_tokens is {kept}; with this model and attention_sinks it is at least {least}"
        )
    return KVEviction(kept, config.attention_sinks, recent)
