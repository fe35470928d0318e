"""Save KV from the runner to the tiers, and restore it where that is faster than computing it."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .....errors import ProviderRuntimeError, UsageError
from .....providers.base import Runner
from .....records import dataclass
from .....storage.root import cache_root
from .....storage.secret import kv_key
from ...requests.chunk import CHUNK_TOKENS, Parts, Save, Tier, TierPrefix, state_key
from ...requests.prompt_costs import PromptCosts
from ...requests.request import Request
from .chunk_store import ChunkStore

_log = logging.getLogger(__name__)

_PATIENCE = 0.1  # seconds for a chunk of a store, until the cost of computing one is known
_LEAST_PATIENCE = 0.01  # a shorter estimate of that cost is noise, and no store could answer
_WEIGHT = 0.2  # of the newest restore in the moving average
_AHEAD = 8  # chunks that a tier may read before they are asked for; more do not stay in a processor's cache
_DECAY = 0.995  # of the average at each skipped restore, so that a slow tier is tried again later


@dataclass(slots=True)
class TierCounters:
    """Running totals; see ``EngineStats``."""

    kv_saved_tokens: int = 0
    kv_restored_tokens: int = 0
    kv_lost_chunks: int = 0


class KVMover:
    """Save and restore chunks, and measure how long restoring takes.

    Args:
        runner: reads and writes KV.
        tier: the first tier; None disables saving.
        identity: a hash of the model's content, part of the chunks' keys.
        costs: the measured cost of computing tokens.

    Attributes:
        patient: wait for a slow tier instead of dropping chunks; set when the engine closes.
        shared: whether other processes wait for prefixes, so that they are saved when a request ends.
    """

    def __init__(self, runner: Runner, tier: Tier | None, identity: str, costs: PromptCosts) -> None:
        self.identity = f"{identity} {runner.info.kv_layout}"
        self.counters = TierCounters()
        self.patient = False
        self.shared = tier is not None and tier.shared
        self._has_states = runner.info.state_bytes > 0
        self._runner = runner  # used only if there is a tier
        self._tier = tier
        self._costs = costs
        self._seconds_per_token: float | None = None

    @property
    def active(self) -> bool:
        """Whether there is a tier."""
        return self._tier is not None

    def available(self, keys: Sequence[bytes]) -> TierPrefix:
        """Return which first tokens the tiers hold; none if restoring is slower than computing."""
        tier = self._tier
        if tier is None or self._too_slow():
            return TierPrefix()
        count = tier.held(keys)
        resumable = count
        if self._has_states and count:
            resumable = tier.last_held([state_key(key) for key in keys[:count]])
        return TierPrefix(CHUNK_TOKENS * resumable, CHUNK_TOKENS * count)

    def save(self, operation: Save) -> None:
        """Copy the chunks and states of a slot that the tiers lack.

        What leaves the slot is kept in the first tier, unless the engine closes.
        """
        tier, slot, keys = self._tier, operation.slot, operation.keys
        if tier is None:
            return
        held = tier.near if operation.leaves and not self.patient else tier.__contains__
        try:
            for i, key in enumerate(keys):
                if held(key):
                    continue
                if i * CHUNK_TOKENS < operation.start:
                    return  # later chunks and states are useless without this one
                self._put(tier, key, self._runner.read_kv(slot, i * CHUNK_TOKENS, CHUNK_TOKENS))
                self.counters.kv_saved_tokens += CHUNK_TOKENS
            for length in operation.states:
                key = state_key(keys[length // CHUNK_TOKENS - 1])
                if not held(key):
                    self._put(tier, key, self._runner.read_state(slot, length))
        except ProviderRuntimeError as error:
            _log.warning("KV of slot %d is not saved: %s", slot, error)

    def restore(self, requests: Sequence[Request], seconds: float) -> list[Request]:
        """Restore KV of running requests, at least one chunk, until ``seconds`` have passed.

        A missing or damaged chunk ends the restore of its request; the remaining tokens are computed.

        Returns:
            The requests whose slots have lost what they held before.
        """
        lost = list[Request]()
        end = time.perf_counter() + seconds
        for request in requests:
            while request.slot is not None and request.restorable > request.num_computed:
                if not self._restore_chunk(request, request.slot):
                    lost.append(request)
                    break
                if time.perf_counter() > end:
                    return lost
        return lost

    def _put(self, tier: Tier, key: bytes, parts: Parts) -> None:
        own = [part if part.base is None else np.array(part) for part in parts]
        tier.put(key, own, wait=self.patient)

    @property
    def store(self) -> ChunkStore | None:
        """The store below the tiers; None if there is none."""
        from .host import HostTier
        from .store import StoreTier

        tier = self._tier.below if isinstance(self._tier, HostTier) else self._tier
        return tier.store if isinstance(tier, StoreTier) else None

    def flush(self, seconds: float) -> bool:
        """Wait until what was saved is written; return whether it is after so many seconds. Any thread."""
        return self._tier is None or self._tier.flush(seconds)

    def close(self) -> None:
        """Close the tiers, which write what should outlive the process."""
        if self._tier is not None:
            self._tier.close()

    def _too_slow(self) -> bool:
        """Whether computing a token is faster than restoring it; False until both are measured.

        A few short prompts, as those of the warm-up, tell too little of what computing takes.
        """
        restoring, computing = self._seconds_per_token, self._costs.seconds_of_prompts(CHUNK_TOKENS)
        if restoring is None or computing is None or CHUNK_TOKENS * restoring <= computing:
            return False
        self._seconds_per_token = restoring * _DECAY
        return True

    def _restore_chunk(self, request: Request, slot: int) -> bool:
        """Restore the next chunk of a request, and after its last one the state, where layers have one.

        Returns:
            Whether the slot still has what it had before.
        """
        begin = time.perf_counter()
        before = request.num_computed
        try:
            complete = self._write_chunk(request, slot)
            if complete and self._has_states and request.restored == request.restorable:
                complete = self._write_state(request, slot)
        except ProviderRuntimeError as error:
            _log.warning("KV of slot %d cannot be restored, it is computed: %s", slot, error)
            kept = max(before, request.restored) // CHUNK_TOKENS * CHUNK_TOKENS
            holds = not self._has_states  # a state cannot be cut to the tokens that the slot has now
            if holds:
                request.num_computed = kept
            self._end(request)
            return holds
        if not complete:
            self._end(request)
            return True
        if not self._has_states or request.restored == request.restorable:
            gained = request.restored - before
            request.num_computed = request.restored
            request.metrics.cached_tokens += gained * (not request.output_token_ids)
            self.counters.kv_restored_tokens += gained
        cost = (time.perf_counter() - begin) / CHUNK_TOKENS
        known = self._seconds_per_token
        self._seconds_per_token = cost if known is None else (1 - _WEIGHT) * known + _WEIGHT * cost
        return True

    def _end(self, request: Request) -> None:
        """End the restore of a request at a chunk or a state that is missing."""
        self.counters.kv_lost_chunks += 1
        request.restorable = request.restored = 0

    def _write_chunk(self, request: Request, slot: int) -> bool:
        """Write the next chunk of a request into its slot; return whether the tiers had it."""
        assert self._tier is not None  # noqa: S101 -- ``available`` found chunks
        assert request.chunk_keys is not None  # noqa: S101 -- by these keys
        index = max(request.num_computed, request.restored) // CHUNK_TOKENS
        keys = request.chunk_keys.keys
        end = min(index + 1 + _AHEAD, request.restorable // CHUNK_TOKENS)
        parts = self._tier.get(keys[index], keys[index + 1 : end])
        if parts is None:
            return False
        self._runner.write_kv(slot, index * CHUNK_TOKENS, CHUNK_TOKENS, parts)
        request.restored = (index + 1) * CHUNK_TOKENS
        return True

    def _write_state(self, request: Request, slot: int) -> bool:
        """Write the state after the restored tokens into the slot; return whether the tiers had it."""
        assert self._tier is not None  # noqa: S101 -- see ``_write_chunk``
        assert request.chunk_keys is not None  # noqa: S101
        parts = self._tier.get(state_key(request.chunk_keys.keys[request.restored // CHUNK_TOKENS - 1]))
        if parts is None:
            return False
        self._runner.write_state(slot, request.restored, parts)
        return True


def own_folder(most_bytes: int) -> tuple[Path | None, int]:
    """Return the folder for KV in the cache folder, and the maximum size of its files.

    Readable by the user only, since KV is made of what users write. None, and a line in the log, if it cannot
    be used.

    Args:
        most_bytes: a limit of the size; a quarter of the free disk is another.
    """
    folder = cache_root() / "prefixes"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        _log.warning("prefixes are kept in memory only: the folder %s cannot be used: %s", folder, error)
        return None, 0
    return folder, min(most_bytes, free // 4)


def make_tier(
    folder: Path | None, folder_bytes: int, host_bytes: int, layout: str, url: str | None, costs: PromptCosts
) -> Tier | None:
    """Create the tiers that the options ask for: host memory above disk, and a store beside it.

    Args:
        folder: of the disk tier; None for no disk tier.
        folder_bytes: maximum size of its files.
        host_bytes: maximum size of the host memory tier; 0 for none.
        layout: ``RunnerInfo.kv_layout``, empty if the runner cannot move KV.
        url: of the store; None for none.
        costs: the measured cost of computing tokens, which limits how long the store is waited for.

    Raises:
        UsageError: the runner cannot move KV, or the store, the folder or the key cannot be used.
    """
    if folder is None and not host_bytes and url is None:
        return None
    if not layout:
        raise UsageError(
            "this provider cannot move KV off its device; omit prefix_cache_dir, prefix_cache_url and "
            "swap_bytes"
        )
    from .disk import DiskTier  # with sockets and formats of files, 4 ms of each start without tiers
    from .host import HostTier
    from .store import StoreTier
    from .store_urls import open_store

    store = None if url is None else open_store(url)
    below: Tier | None
    try:
        below = DiskTier(folder, folder_bytes, kv_key()) if folder is not None else None
    except OSError as error:
        raise UsageError(f"prefix_cache_dir {folder} cannot be used: {error}") from error
    if store is not None:

        def patience() -> float:
            seconds = costs.seconds_of_prompts(CHUNK_TOKENS)
            return _PATIENCE if seconds is None else max(_LEAST_PATIENCE, seconds)

        below = StoreTier(store, kv_key(), patience, below)
    return HostTier(host_bytes, below) if host_bytes else below
