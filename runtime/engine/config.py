"""How an engine schedules, as its user says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .sampling.sampler import BatchLogitsProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine schedules.

    Args:
        max_step_tokens: most tokens of one step.
        step_stretch: how many times longer than without prompts a step may take, by what was measured, while
            streams run. Smaller values keep them smooth, larger ones finish prompts sooner.
        max_queue: most requests that may wait; None is no limit.
        kv_bytes: most bytes of KV that all requests together may hold; None leaves it to the slots.
        prefix_cache: keep KV of finished requests, while there is room, for others that begin alike.
        prefix_cache_dir: a folder where evicted prefixes are kept, for this process and later ones; None is
            nowhere.
        prefix_cache_bytes: most bytes of the files there.
        trim_windows: when layers with a sliding window give back what lies behind it: ``when_short`` of KV,
            before anybody loses a slot; or ``always``, which takes the least memory, but then texts share
            none of their beginnings but the whole. Without ``prefix_cache`` it is always.
        context_overflow: what happens when prompt and output fill the context: ``length`` ends the request,
            ``slide`` drops the middle and goes on.
        attention_sinks: how many of the first tokens stay when others are dropped.
        squeeze_kv: KV of about so many tokens is all that a request keeps while it generates; the oldest that
            seem to matter least go. It changes what is generated (``docs/engine.md``). None keeps all.
        swap_bytes: host memory for KV of preempted requests and evicted prefixes, beside ``kv_bytes``.
            Without it, and without ``prefix_cache_dir``, such KV is computed again.
        compile_seconds: how long a request waits for its grammar before it is refused.
        logits_processors: change the logits of whole batches, in this order, before tokens are drawn.
        adaptive_speculation: propose tokens only as far as that pays; False always proposes all it can.
    """

    max_step_tokens: int = 512
    step_stretch: float = 2.25
    max_queue: int | None = None
    kv_bytes: int | None = None
    prefix_cache: bool = True
    prefix_cache_dir: str | Path | None = None
    prefix_cache_bytes: int = 2**33
    swap_bytes: int = 0
    trim_windows: Literal["when_short", "always"] = "when_short"
    context_overflow: Literal["length", "slide"] = "length"
    attention_sinks: int = 4
    squeeze_kv: int | None = None
    compile_seconds: float = 10.0
    logits_processors: tuple[BatchLogitsProcessor, ...] = ()
    adaptive_speculation: bool = True
