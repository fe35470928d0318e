"""Carries KV between the runner and the tiers, where that is cheaper than to compute it again."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from .....errors import ProviderRuntimeError, UsageError
from .....providers.base import MovableRunner, Runner
from .....storage.secret import kv_key
from ...requests.chunk import CHUNK_TOKENS, Tier
from ...requests.prompt_costs import PromptCosts
from ...requests.request import Request
from .disk import DiskTier
from .host import HostTier

_log = logging.getLogger(__name__)

_WEIGHT = 0.2  # of the newest transfer in the mean
_FORGET = 0.995  # a tier found too slow is tried again some time


@dataclass(slots=True)
class TierCounters:
    """Running totals; see EngineStats."""

    kv_saved_tokens: int = 0
    kv_restored_tokens: int = 0
    kv_lost_chunks: int = 0


class KVMover:
    """Saves and restores chunks, and learns what that costs.

    Args:
        runner: gives and takes KV.
        tier: keeps it; None keeps nothing.
        identity: the model's content, for the chunks' names.
        costs: what computing costs instead.

    Attributes:
        patient: whether to wait for a slow tier rather than to lose chunks, as at the end.
    """

    def __init__(self, runner: Runner, tier: Tier | None, identity: str, costs: PromptCosts) -> None:
        self.identity = f"{identity} {runner.info.kv_layout}"
        self.counters = TierCounters()
        self.patient = False
        self._runner = cast(MovableRunner, runner)  # where there is a tier
        self._tier = tier
        self._costs = costs
        self._seconds_per_token: float | None = None

    @property
    def active(self) -> bool:
        """Whether anything is kept at all."""
        return self._tier is not None

    def available(self, keys: Sequence[bytes]) -> int:
        """Tokens that the tiers hold from the beginning on, if restoring is worth it."""
        tier = self._tier
        if tier is None or self._too_slow():
            return 0
        return CHUNK_TOKENS * next((i for i, key in enumerate(keys) if key not in tier), len(keys))

    def save(self, slot: int, keys: Sequence[bytes], start: int = 0) -> None:
        """Copy a slot's chunks to the tiers, as far as they are not there.

        Args:
            slot: holds them.
            keys: their names.
            start: tokens before it are not in the slot any more.
        """
        for i, key in enumerate(keys):
            if self._tier is None or key in self._tier:
                continue
            if i * CHUNK_TOKENS < start:
                return  # without this one, nobody asks for those that follow
            try:
                parts = self._runner.read_kv(slot, i * CHUNK_TOKENS, CHUNK_TOKENS)
            except ProviderRuntimeError as error:
                _log.warning("KV of slot %d is not kept: %s", slot, error)
                return
            self._tier.put(key, [np.array(part) for part in parts], wait=self.patient)
            self.counters.kv_saved_tokens += CHUNK_TOKENS

    def restore(self, requests: Sequence[Request], seconds: float) -> None:
        """Bring KV of running requests back, at least a chunk, until ``seconds`` have passed.

        A chunk that is gone or damaged ends the restoring of its request; the rest is computed.
        """
        end = time.perf_counter() + seconds
        for request in requests:
            while request.slot is not None and request.restorable > request.num_computed:
                self._restore_chunk(request, request.slot)
                if time.perf_counter() > end:
                    return

    def close(self) -> None:
        """Bring what should outlive the process to where it does."""
        if self._tier is not None:
            self._tier.close()

    def _too_slow(self) -> bool:
        """Whether computing a token is cheaper than restoring it, as far as both were measured."""
        restoring, computing = self._seconds_per_token, self._costs.seconds_per_prompt_token()
        if restoring is None or computing is None or restoring <= computing:
            return False
        self._seconds_per_token = restoring * _FORGET
        return True

    def _restore_chunk(self, request: Request, slot: int) -> None:
        assert self._tier is not None  # noqa: S101 -- something was found in it
        assert request.chunk_keys is not None  # noqa: S101 -- and by these names
        index = request.num_computed // CHUNK_TOKENS
        begin = time.perf_counter()
        parts = self._tier.get(request.chunk_keys.keys[index])
        try:
            if parts is not None:
                self._runner.write_kv(slot, index * CHUNK_TOKENS, CHUNK_TOKENS, parts)
        except ProviderRuntimeError as error:
            _log.warning("KV of slot %d is computed instead: %s", slot, error)
            request.num_computed = index * CHUNK_TOKENS
            parts = None
        if parts is None:
            self.counters.kv_lost_chunks += 1
            request.restorable = 0
            return
        gained = (index + 1) * CHUNK_TOKENS - request.num_computed
        request.num_computed += gained
        request.metrics.cached_tokens += gained * (not request.output_token_ids)
        self.counters.kv_restored_tokens += gained
        cost = (time.perf_counter() - begin) / CHUNK_TOKENS
        known = self._seconds_per_token
        self._seconds_per_token = cost if known is None else (1 - _WEIGHT) * known + _WEIGHT * cost


def make_tier(folder: Path | None, folder_bytes: int, host_bytes: int, layout: str) -> Tier | None:
    """The tiers that the options ask for, the host's above the files.

    Args:
        folder: of the files; None is no files.
        folder_bytes: their budget.
        host_bytes: budget of host memory; 0 is none.
        layout: of the runner.

    Raises:
        UsageError: the runner's KV cannot be moved, or the folder or the key cannot be used.
    """
    if folder is None and not host_bytes:
        return None
    if not layout:
        raise UsageError("this provider's KV cannot leave its device; leave prefix_cache_dir and swap_bytes")
    try:
        below = DiskTier(folder, folder_bytes, kv_key()) if folder is not None else None
    except OSError as error:
        raise UsageError(f"prefix_cache_dir {folder} cannot be used: {error}") from error
    return HostTier(host_bytes, below) if host_bytes else below
