"""Counters and gauges of the engine."""

from __future__ import annotations

from ...records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot; counters start at 0 when the engine is created.

    Args:
        running: requests that hold a slot.
        waiting: requests in the queue, or waiting for their grammar or a prefill server.
        slots: maximum number of running requests.
        kv_tokens: tokens held by all slots, for running requests or as prefixes; a shared token counts in
            each slot.
        idle_kv_tokens: the part of ``kv_tokens`` that finished requests left.
        kv_tokens_budget: maximum of ``kv_tokens``.
        kv_bytes: memory of the KV cache. It is smaller than ``kv_tokens`` needs where slots share blocks or
            sliding windows freed some, and larger where memory is reserved in advance.
        kv_bytes_budget: maximum of ``kv_bytes``; None if only the slots limit it.
        steps: forward steps run.
        prompt_tokens: prompt tokens of all accepted requests.
        generated_tokens: tokens sampled.
        computed_tokens: tokens run through the model, including recomputed ones.
        preemptions: how often a running request lost its slot.
        finished: requests that ended by a stop, their length limit, or an embedding.
        cancelled: requests ended by the caller or by their deadline.
        failed: requests that ended with an error.
        prefix_queries: look-ups in the prefix cache, one for each admission of a request.
        prefix_hits: look-ups that found a prefix.
        prefix_cached_tokens: tokens of these prefixes.
        kv_saved_tokens: tokens whose KV was saved to host memory or disk.
        kv_restored_tokens: tokens whose KV was restored from there.
        kv_lost_chunks: chunks of 64 tokens that were missing or damaged when they were to be restored.
        prefills_remote: prompts that the prefill server computed in time.
        prefills_late: prompts that it did not compute in time, so that they were computed here.
        prefills_failed: prompts that it refused, or that did not reach it.
        prefills_foreign: prompts that it refused because it serves another model or layout of KV.
        prefills_skipped: prompts that were not sent to it, since it was slower than computing here, or so
            soon after a failure.
        proposed_tokens: tokens proposed by speculation or by a grammar.
        accepted_tokens: proposed tokens that became output.
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
    prefills_remote: int
    prefills_late: int
    prefills_failed: int
    prefills_foreign: int
    prefills_skipped: int
    proposed_tokens: int
    accepted_tokens: int

    @property
    def acceptance_rate(self) -> float:
        """Return the accepted share of the proposed tokens, 0 if none were proposed."""
        return self.accepted_tokens / self.proposed_tokens if self.proposed_tokens else 0.0


@dataclass(slots=True)
class Counters:
    """The engine's running totals; see ``EngineStats``."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
