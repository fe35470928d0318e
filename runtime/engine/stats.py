"""What the engine is doing, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot; counters count since the engine was made.

    Args:
        running: requests that hold a slot.
        waiting: requests in the queue.
        slots: how many requests may run at once.
        kv_tokens: tokens that slots hold, for running requests or for later ones; shared ones count in each.
        idle_kv_tokens: those of them that finished requests left behind.
        kv_tokens_budget: most tokens that slots may hold together.
        kv_bytes: memory that the KV cache takes up: less than ``kv_tokens`` would need where slots share it
            or sliding windows gave some back, more where it is reserved as a whole.
        kv_bytes_budget: most bytes the KV cache may hold; None is no limit beyond the slots' own.
        steps: forward steps run.
        prompt_tokens: prompt tokens of the requests taken in.
        generated_tokens: tokens sampled.
        computed_tokens: tokens run through the model, recomputed ones included.
        preemptions: times a running request had to give up its slot.
        finished: requests that ended by themselves.
        cancelled: requests that the caller ended.
        failed: requests that ended with an error.
        prefix_queries: times a request looked for KV of its prefix, when it got its slot.
        prefix_hits: times it found some.
        prefix_cached_tokens: tokens whose KV it found.
        kv_saved_tokens: tokens whose KV went to host memory or disk.
        kv_restored_tokens: tokens whose KV came back from there.
        kv_lost_chunks: pieces of 64 tokens that were gone or damaged when they were wanted.
        proposed_tokens: tokens that speculation, or a demanded form, proposed.
        accepted_tokens: those of them that became output.
    """

    running: int
    waiting: int
    slots: int
    kv_tokens: int
    idle_kv_tokens: int
    kv_tokens_budget: int
    kv_bytes: int
    kv_bytes_budget: int | None
    steps: int
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    preemptions: int
    finished: int
    cancelled: int
    failed: int
    prefix_queries: int
    prefix_hits: int
    prefix_cached_tokens: int
    kv_saved_tokens: int
    kv_restored_tokens: int
    kv_lost_chunks: int
    proposed_tokens: int
    accepted_tokens: int

    @property
    def acceptance_rate(self) -> float:
        """The share of proposed tokens that became output; 0 where none were proposed."""
        return self.accepted_tokens / self.proposed_tokens if self.proposed_tokens else 0.0


@dataclass(slots=True)
class Counters:
    """The engine's running totals; see EngineStats."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
