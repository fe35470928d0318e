"""KV eviction: a bounded cache for long answers. It is lossy.

While a request generates, its cache is cut down to a number of tokens whenever it holds a quarter more. What
stays are the attention sinks (the first tokens, arXiv:2309.17453), the recent half, and of the others those
that the runner finds most important. Prompts are read whole, as in SnapKV (arXiv:2404.14469), and other
requests may share their KV until the first eviction.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import cast

from ...errors import ProviderRuntimeError, UsageError
from ...providers.base import EvictingRunner, KVEviction, Runner, RunnerInfo
from .config import EngineConfig
from .requests.request import Request
from .schedule.scheduler import Scheduler

_log = logging.getLogger(__name__)

_SLACK = 4  # a quarter more before the next time, so that few tokens are copied for each that is generated


class KVEvictor:
    """Drops KV of requests that hold much.

    Args:
        runner: whose slots they are.
        scheduler: keeps the books.
        eviction: what stays.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, eviction: KVEviction) -> None:
        self._runner = cast(EvictingRunner, runner)
        self._scheduler = scheduler
        self._eviction = eviction
        self._most = eviction.kept + max(1, eviction.kept // _SLACK)

    def apply(self, requests: Iterable[Request]) -> set[int]:
        """Drop KV of those that generate and hold too much; return slots whose content was lost by it."""
        lost = set()
        for request in requests:
            held = request.num_computed - request.num_dropped
            generates = request.num_computed >= len(request.prompt_token_ids)
            if request.slot is None or not generates or held < self._most:
                continue
            try:
                self._runner.evict_kv(request.slot, request.num_computed, self._eviction)
            except ProviderRuntimeError as error:
                _log.warning(
                    "slot %d could not have KV evicted, it is computed again: %s", request.slot, error
                )
                lost.add(request.slot)
                continue
            self._scheduler.drop(request, held - self._eviction.kept)
        return lost


def make_evictor(
    runner: Runner, scheduler: Scheduler, config: EngineConfig, info: RunnerInfo
) -> KVEvictor | None:
    """What ``config.kv_eviction_tokens`` asks for.

    Raises:
        UsageError: the runner cannot drop KV, or what is to be kept is too little.
    """
    kept = config.kv_eviction_tokens
    if kept is None:
        return None
    recent = kept // 2
    if not info.evicts_kv:
        raise UsageError(
            "this provider, or its type of KV cache, cannot evict KV of single tokens; leave "
            "kv_eviction_tokens out or choose another kv_cache_dtype"
        )
    if config.context_shift:
        raise UsageError("kv_eviction_tokens and context_shift both drop tokens; choose one")
    if recent <= config.attention_sinks or recent < info.sliding_window:
        least = 2 * max(config.attention_sinks + 1, info.sliding_window)
        raise UsageError(
            f"kv_eviction_tokens is {kept}; with this model and attention_sinks it is at least {least}"
        )
    return KVEvictor(runner, scheduler, KVEviction(kept, config.attention_sinks, recent))
