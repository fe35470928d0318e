"""Measure carryall on pages: ``python carryall_pages.py PACKAGE[,OPTION=VALUE ...]``.

The options are the provider's; ``quantize`` is the form of the decoder.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from page_work import PageTiming, PageWork
from worker import serve

import carryall
from carryall import AsyncLLM, SamplingParams


def load(given: str) -> tuple[str, Any]:
    """Load the model and return the engine's name and its measuring function."""
    path, *options = given.split(",")
    chosen = dict(option.split("=") for option in options)
    quantize = chosen.pop("quantize", None)
    llm = AsyncLLM(path, provider="cpu", max_slots=2, quantize=quantize, provider_options=chosen)
    loop = asyncio.new_event_loop()
    name = f"carryall {carryall.__version__} {Path(path).name} {' '.join(options)}".strip()
    return name, lambda work: loop.run_until_complete(_measured(llm, work))


async def _measured(llm: AsyncLLM, work: PageWork) -> PageTiming:
    if work.kind != "beside":
        return await _answered(llm, work)
    moments, started = list[float](), asyncio.Event()

    async def decode(most: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        async for output in llm.generate(f"Once upon a time {work.seed} {most}", params):
            if output.outputs and output.outputs[0].token_ids:
                moments.append(time.perf_counter())
                if len(moments) >= _BEFORE:
                    started.set()

    beside = asyncio.create_task(decode(4000))
    await started.wait()
    began = time.perf_counter()
    timing = await _answered(llm, work)
    beside.cancel()
    await asyncio.gather(beside, return_exceptions=True)
    during = [moment for moment in moments if began <= moment <= began + timing.first_token_s]
    moments.clear()
    await decode(_BEFORE + len(during))  # a step takes longer in a longer text
    gaps = [tuple(b - a for a, b in itertools.pairwise(each)) for each in (moments[_BEFORE:], during)]
    # the gaps without a page first, then a negative number, then those beside the page
    return dataclasses.replace(timing, gaps_s=(*gaps[0], -1.0, *gaps[1]))


_BEFORE = 40  # tokens that are decoded before the page comes


async def _answered(llm: AsyncLLM, work: PageWork) -> PageTiming:
    parts: list[dict[str, Any]] = [{"type": "text", "text": work.question()}]
    if work.kind != "text":
        parts.insert(0, {"type": "image", "image": work.pixels()})
    params = SamplingParams(temperature=0, max_tokens=work.new_tokens, ignore_eos=True)
    began, processor, moments, spent, length = time.perf_counter(), time.process_time(), [], 0.0, 0
    prompt = await llm.render([{"role": "user", "content": parts}])
    async for output in llm.generate(prompt, params):
        if not output.outputs or not output.outputs[0].token_ids:
            continue
        if not moments:
            spent, length = time.process_time() - processor, len(output.prompt_token_ids)
        moments.append(time.perf_counter())
    steps = [b - a for a, b in itertools.pairwise(moments)]
    step = statistics.median(steps) if steps else 0.0
    return PageTiming(moments[0] - began, spent, step, length)


serve(load, PageWork)
