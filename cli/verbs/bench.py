"""``carryall bench``."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import onnx_ir as ir

from ...errors import CarryallError
from ...graph_opt.graph import graph_facts
from ...providers.host.machine import describe_machine, memory_bandwidth, usable_cores
from ...runtime.engine.engine import Engine
from ...runtime.models.loading import open_engine
from ..bench_report import show
from ..generation import open_model
from ..load_options import Chosen, config_options
from ..measure import Sample, Workload, check_fits, measure, spread
from ..memory import peak_memory, reset_peak
from ..options import json_option, print_json, quiet_option
from ..progress import progress
from ..sections import SectionedCommand


def _batch_sizes(ctx: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    parts = value.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"'{value}' is no list of batch sizes such as 1,8")
    return [int(part) for part in parts]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine, and what its decoding step costs."""

    provider: str
    engine: Engine
    seconds: float
    weight_bytes: int

    def facts(self) -> dict[str, Any]:
        """Return what the document says of the model."""
        return {
            "provider": self.provider,
            "load_seconds": round(self.seconds, 3),
            "weight_bytes_per_step": self.weight_bytes,
            "kv_bytes_per_token": self.engine.info.kv_bytes_per_token,
        }


@click.command("bench", cls=SectionedCommand)
@config_options(
    without=("max_slots", "max_queue", "chat_template"), prefix_cache=False, max_step_slowdown=math.inf
)
@click.option(
    "--batch", callback=_batch_sizes, default="1,8", show_default=True, help="Requests that run together."
)
@click.option(
    "--prompt-tokens", type=click.IntRange(1), default=256, show_default=True, help="Length of each prompt."
)
@click.option(
    "--new-tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens generated for each."
)
@click.option(
    "--repeats", type=click.IntRange(1), default=5, show_default=True, help="Timed runs, after a warm-up."
)
@json_option
@quiet_option
def command(
    chosen: Chosen,
    batch: list[int],
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure how fast a model runs here.

    Random prompts go through the same engine that serves requests, several at a time. Prefill is the speed
    of reading prompts, decode that of writing tokens. Each decoding step reads all weights and the KV cache,
    so memory speed is its limit: the last column tells how near it comes. Figures are medians, with the
    least and largest in brackets.

    \b
    Examples:
        carryall bench demo
        carryall bench qwen3 --batch 1,8,32 --prompt-tokens 512 --json
        carryall bench qwen3 --provider openvino --provider-option inference_precision=auto
    """
    silent = quiet or as_json
    works = [Workload(batch=size, prompt_tokens=prompt_tokens, new_tokens=new_tokens) for size in batch]
    loaded = _load(chosen, max(batch), silent)
    try:
        check_fits(loaded.engine, works)
        threads = chosen.model.num_threads or usable_cores()
        gigabytes = memory_bandwidth(threads)
        results, fault = _measure_all(loaded, works, repeats, gigabytes, silent)
    finally:
        loaded.engine.close()
    document = {
        "model": str(chosen.model.model),
        "cpu": describe_machine().cpu,
        "threads": threads,
        "memory_bandwidth_gb_s": round(gigabytes, 2),
        "peak_memory_bytes": peak_memory(),
        **loaded.facts(),
        "results": results,
    }
    if results:
        (print_json if as_json else show)(document)
    if fault is not None:
        raise fault


def _load(chosen: Chosen, slots: int, quiet: bool) -> Loaded:
    """Load a model twice, since what the first time exports, lowers and chooses is not to be measured."""
    first = open_model(chosen.model, max_slots=slots, quiet=quiet)
    model = dataclasses.replace(chosen.model, provider=first.provider)  # "auto" has become the chosen one
    weight_bytes = sum(graph_facts.bytes_per_step(ir.load(graph)) for graph in first.graphs)
    first.close()
    del first
    gc.collect()
    reset_peak()
    start = time.perf_counter()
    _, engine = open_engine(model, chosen.engine, {"max_slots": slots}, owner="bench")
    return Loaded(model.provider, engine, time.perf_counter() - start, weight_bytes)


def _measure_all(
    loaded: Loaded, works: Sequence[Workload], repeats: int, gigabytes: float, quiet: bool
) -> tuple[list[dict[str, Any]], CarryallError | None]:
    """Results of the workloads in turn, and what ended them early."""
    results: list[dict[str, Any]] = []
    with progress("bench", quiet=quiet) as tell:
        for index, work in enumerate(works):
            samples = []
            for repeat in range(repeats + 1):
                gc.collect()
                try:
                    samples.append(measure(loaded.engine, work, seed=repeat))
                except CarryallError as error:
                    return results, error
                tell(index * (repeats + 1) + repeat + 1, len(works) * (repeats + 1))
            results.append(_summary(work, samples[1:], loaded, gigabytes))  # without the warm-up
    return results, None


def _summary(work: Workload, samples: Sequence[Sample], loaded: Loaded, gigabytes: float) -> dict[str, Any]:
    decode = spread([sample.decode for sample in samples])
    cached_tokens = work.batch * (work.prompt_tokens + work.new_tokens / 2)  # on average over the decode
    step_bytes = loaded.weight_bytes + round(cached_tokens * loaded.engine.info.kv_bytes_per_token)
    return {
        **asdict(work),
        "repeats": len(samples),
        "prefill_tokens_per_second": spread([sample.prefill for sample in samples]),
        "decode_tokens_per_second": decode,
        "time_to_first_token_ms": spread([1e3 * sample.first_token for sample in samples]),
        "bytes_per_step": step_bytes,
        "memory_bandwidth_share": decode["median"] / work.batch * step_bytes / (gigabytes * 1e9),
    }
