"""How an engine schedules, and how much memory it may use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...options import Checked, option
from .sampling.sampler import BatchLogitsProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Checked):
    """How an engine schedules, and how much memory it may use.

    Args:
        max_slots: most sequences computed at once; each slot holds the KV cache of one.
        max_step_tokens: most tokens of one step, prompts and generated tokens together.
        max_step_slowdown: how many times longer prompts may make a step while other requests generate.
            Smaller values keep their streams smooth, larger ones finish prompts sooner, ``inf`` runs prompts
            first.
        max_queue: most requests that may wait; more are refused. By default there is no limit.
        kv_bytes: most bytes of KV that all requests together may hold; by default what the slots can hold.
        prefix_cache: keep the KV of finished requests, while there is room, for prompts that begin alike.
        prefix_cache_dir: a folder where evicted prefixes are kept, for this process and later ones.
        prefix_cache_bytes: most bytes of the files in ``prefix_cache_dir``.
        swap_bytes: host memory for KV of preempted requests and evicted prefixes, beside ``kv_bytes``.
            Without it, and without ``prefix_cache_dir``, such KV is computed again.
        trim_windows: when layers with a sliding window free the KV behind it: ``when_short`` of KV, before a
            slot is evicted; or ``always``, which takes the least memory, but then only whole prompts are
            shared. Without ``prefix_cache`` it is always.
        context_shift: when prompt and output fill the context, drop the middle and go on, instead of ending
            the request.
        attention_sinks: how many of the first tokens stay when others are dropped.
        kv_eviction_tokens: limit the KV cache of a request that generates to about this many tokens (lossy);
            tokens that matter least are evicted. By default none are.
        grammar_timeout_seconds: how long a request waits for its grammar to compile before it is refused.
        logits_processors: change the logits of whole batches, in this order, before tokens are sampled.
        adaptive_speculation: propose tokens only as far as that pays; otherwise always as many as possible.

    Raises:
        UsageError: a value is of another type, or out of range.
    """

    max_slots: int = option(32, least=1, most=math.inf)  # compared with the memory that is there
    max_step_tokens: int = option(512, least=1)
    max_step_slowdown: float = option(2.25, least=1)
    max_queue: int | None = option(None, least=0)
    kv_bytes: int | None = option(None, least=1, unit="bytes")
    prefix_cache: bool = True
    prefix_cache_dir: Path | None = None
    prefix_cache_bytes: int = option(2**33, least=0, unit="bytes")
    swap_bytes: int = option(0, least=0, unit="bytes")
    trim_windows: Literal["when_short", "always"] = "when_short"
    context_shift: bool = False
    attention_sinks: int = option(4, least=0)
    kv_eviction_tokens: int | None = option(None, least=1)
    grammar_timeout_seconds: float = option(10.0, least=0)
    logits_processors: tuple[BatchLogitsProcessor, ...] = ()
    adaptive_speculation: bool = True
