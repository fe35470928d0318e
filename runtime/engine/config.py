"""Options of the engine: batch limits, KV memory, prefix cache, context length, speculation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from ...options import Checked, option
from ...records import dataclass
from .sampling.sampler import BatchLogitsProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Checked):
    """Options of the engine: batch limits, KV memory, prefix cache, context length, speculation.

    Args:
        max_slots: maximum number of sequences computed at once; each slot holds the KV cache of one.
        max_step_tokens: maximum number of tokens of one step, prompt and generated tokens together; by
            default what the provider prefers: 2,048 on CUDA, 512 elsewhere.
        max_step_slowdown: how many times longer prompt chunks may make a step while other requests generate.
            Smaller values keep running streams smooth, larger ones finish prompts sooner; ``inf`` removes the
            limit.
        max_queue: maximum number of waiting requests; more are refused; none is no limit.
        max_queued_tokens: maximum number of prompt tokens that are still to be computed, of all requests
            together; a further request is refused, unless none are. What is cached does not count. None is
            no limit.
        kv_bytes: maximum KV memory of all requests together; by default what the slots can hold.
        prefix_cache: keep the KV of finished requests, while there is room, for prompts with the same first
            tokens.
        prefix_cache_dir: a folder for evicted prefixes, used by this process and later ones; ``auto`` is one
            in the cache folder, where the model and the provider can move KV, and at most a quarter of the
            free disk. ``serve`` has ``auto`` by default.
        prefix_cache_bytes: maximum size of the files in ``prefix_cache_dir``.
        prefix_cache_url: a store that several processes and hosts share, for evicted prefixes:
            ``redis://host:6379/0`` (Valkey) or a folder of fsspec (``s3://bucket/folder``,
            ``file:///mnt/kv``). They need the same ``CARRYALL_KV_KEY``. ``serve://4GB`` keeps it in this
            process, and ``grpc://host:8001`` reads it from such a process.
        prefill_server: a ``serve --role prefill`` of the same model (``http://host:8000``), which computes
            long prompts and hands their KV over through ``prefix_cache_url`` (docs/fleet.md). Its API key is
            ``CARRYALL_PREFILL_KEY``.
        prefill_tokens: prompts with fewer tokens to compute are not sent to ``prefill_server``.
        kv_events_config: publish which blocks of tokens have KV, over ZeroMQ in vLLM's schema, so that
            routers send requests to it (docs/fleet.md): a JSON object with vLLM's options, such as
            ``{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}``.
        swap_bytes: host memory for KV of preempted requests and evicted prefixes, in addition to
            ``kv_bytes``. Without it, and without ``prefix_cache_dir``, such KV is computed again.
        trim_windows: when layers with a sliding window free the KV behind it. ``when_short``: when KV memory
            is short, before a slot is evicted. ``always``: at once, which needs the least memory, but then
            only whole prompts are shared. Without ``prefix_cache`` it is ``always``.
        context_shift: when prompt and output fill the context, drop the middle and go on, instead of ending
            the request.
        attention_sinks: number of first tokens that stay when others are dropped.
        kv_eviction_tokens: limit the KV cache of a request that generates to about this many tokens (lossy);
            the least important tokens are evicted. By default none are.
        grammar_timeout_seconds: how long a request waits for its grammar to compile before it is refused.
        max_images: most pictures of a conversation; each page of a PDF file is one.
        max_image_pixels: most pixels of all pictures of a conversation together.
        max_audio_seconds: longest recording that is written down.
        logits_processors: change the logits of whole batches, in this order, before tokens are sampled.
        adaptive_speculation: propose tokens only where that is expected to save time; otherwise always
            propose as many as possible.

    Raises:
        UsageError: a value has the wrong type or is out of range.
    """

    max_slots: int = option(32, least=1, most=math.inf)  # the available memory limits it at load
    max_step_tokens: int | None = option(None, least=1)
    max_step_slowdown: float = option(2.25, least=1)
    max_queue: int | None = option(None, least=0)
    max_queued_tokens: int | None = option(None, least=1)
    kv_bytes: int | None = option(None, least=1, unit="bytes")
    prefix_cache: bool = True
    prefix_cache_dir: Path | Literal["auto"] | None = None
    prefix_cache_bytes: int = option(2**33, least=0, unit="bytes")
    prefix_cache_url: str | None = None
    prefill_server: str | None = None
    prefill_tokens: int = option(256, least=1)
    kv_events_config: str | None = None
    swap_bytes: int = option(0, least=0, unit="bytes")
    trim_windows: Literal["when_short", "always"] = "when_short"
    context_shift: bool = False
    attention_sinks: int = option(4, least=0)
    kv_eviction_tokens: int | None = option(None, least=1)
    grammar_timeout_seconds: float = option(10.0, least=0)
    max_images: int = option(128, least=0)
    max_image_pixels: int = option(256_000_000, least=1)
    max_audio_seconds: float = option(7200.0, above=0, most=7200.0)
    logits_processors: tuple[BatchLogitsProcessor, ...] = ()
    adaptive_speculation: bool = True
