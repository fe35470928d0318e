"""``carryall.benchmark``: measure the speed of a model on this machine."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import CarryallError, UsageError
from ...graph_opt.graph import graph_facts
from ...graph_opt.graph.onnx_files import read_onnx
from ...progress import Progress, phase
from ...providers.host.machine import describe_machine, memory_bandwidth, usable_cores
from ...records import dataclass
from ...reports import Report, human_bytes
from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..evaluate.throughput import Workload, WorkloadRun, check_fits, measure, spread
from ..models.config import ModelConfig, model_config, split_fields
from ..models.loading import load_model, open_engine
from ..process.memory import peak_memory, reset_peak
from ..types.arguments import checked_arguments
from .evaluate import load_notes

_PROMPTS_FIRST = EngineConfig(prefix_cache=False, max_step_slowdown=math.inf)

MOST_REPEATS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkReport(Report):
    """Speed of a model on this machine.

    Attributes:
        model: the model.
        provider: the provider that ran it.
        cpu: the name of the processor.
        threads: number of CPU threads.
        memory_bandwidth_gb_s: measured read bandwidth of the memory, in GB/s.
        peak_memory_bytes: peak resident memory; None where the system does not report it.
        load_seconds: time to load the prepared model.
        weight_bytes_per_step: bytes of weights that a decode step reads.
        kv_bytes_per_token: KV cache bytes of a token.
        results: one for each batch size: ``batch``, ``prompt_tokens``, ``new_tokens``, ``repeats``, median,
            min and max of ``prefill_tokens_per_second``, ``decode_tokens_per_second`` and
            ``time_to_first_token_ms``, ``bytes_per_step``, ``memory_bandwidth_share``.
        notes: which provider was chosen, and which nodes fell back to the CPU.
        error: the error that ended the measurements early; None if there was none.
    """

    model: str
    provider: str
    cpu: str
    threads: int
    memory_bandwidth_gb_s: float
    peak_memory_bytes: int | None
    load_seconds: float
    weight_bytes_per_step: int
    kv_bytes_per_token: int
    results: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()
    error: CarryallError | None = None

    def check(self) -> None:
        """Raise the error that ended the measurements early, if there was one.

        Raises:
            CarryallError: the measurements ended early.
        """
        if self.error is not None:
            raise self.error

    def to_dict(self) -> dict[str, Any]:
        error = None if self.error is None else str(self.error)
        return {**asdict(self), "results": list(self.results), "notes": list(self.notes), "error": error}

    def rows(self) -> list[tuple[str, str]]:
        speeds = [
            (
                f"batch {result['batch']}",
                f"prefill {result['prefill_tokens_per_second']['median']:.0f} tokens/s, "
                f"decode {result['decode_tokens_per_second']['median']:.1f} tokens/s, "
                f"first token after {result['time_to_first_token_ms']['median']:.0f} ms",
            )
            for result in self.results
        ]
        return [
            ("model", self.model),
            ("machine", f"{self.provider}, {self.threads} threads, {self.cpu}"),
            *speeds,
            ("weights read per step", human_bytes(self.weight_bytes_per_step)),
            ("memory bandwidth", f"{self.memory_bandwidth_gb_s:.0f} GB/s"),
            ("load time", f"{self.load_seconds:.2f} s"),
        ]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """An engine, and the weights that a decode step reads."""

    provider: str
    engine: Engine
    seconds: float
    weight_bytes: int
    notes: tuple[str, ...]


@checked_arguments
def benchmark(
    model: str | Path | ModelConfig,
    *,
    batch: Sequence[int] = (1, 8),
    prompt_tokens: int = 256,
    new_tokens: int = 64,
    repeats: int = 5,
    engine_config: EngineConfig | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> BenchmarkReport:
    """Measure prefill and decode speed with random prompts, in the engine that serves requests.

    Args:
        model: a package, a checkpoint folder, a hub id, or ``demo``; or a ``ModelConfig`` with all options.
        batch: batch sizes to measure.
        prompt_tokens: length of each prompt.
        new_tokens: tokens generated for each prompt.
        repeats: number of timed runs, after a warm-up.
        engine_config: by default all prompts are computed first and no prefix is cached, so that decode speed
            is measured while all requests generate.
        progress: called in the phases ``prepare`` and ``bench``.
        **fields: fields of ``ModelConfig`` and ``EngineConfig``.

    Raises:
        UsageError: there is no such model, a number is out of range, or the requests exceed the context.
        ProviderUnavailableError: the provider is not available on this machine.
        ProviderRuntimeError: loading failed. A run that fails is the report's ``error``.
    """
    _check(batch, prompt_tokens, new_tokens, repeats)
    of_model, of_engine = split_fields(fields, "benchmark")
    asked = model_config(model, of_model)
    config = dataclasses.replace(engine_config or _PROMPTS_FIRST, **of_engine, max_slots=max(batch))
    loaded = _load(asked, config, phase(progress, "prepare"))
    works = [Workload(batch=size, prompt_tokens=prompt_tokens, new_tokens=new_tokens) for size in batch]
    try:
        check_fits(loaded.engine, works)
        gigabytes = memory_bandwidth(asked.num_threads or usable_cores())
        results, error = _measure_all(loaded, works, repeats, gigabytes, phase(progress, "bench"))
        kv_bytes = loaded.engine.info.kv_bytes_per_token
    finally:
        loaded.engine.close()
    return BenchmarkReport(
        model=str(asked.model),
        provider=loaded.provider,
        cpu=describe_machine().cpu,
        threads=asked.num_threads or usable_cores(),
        memory_bandwidth_gb_s=round(gigabytes, 2),
        peak_memory_bytes=peak_memory(),
        load_seconds=round(loaded.seconds, 3),
        weight_bytes_per_step=loaded.weight_bytes,
        kv_bytes_per_token=kv_bytes,
        results=tuple(results),
        notes=loaded.notes,
        error=error,
    )


def _check(batch: Sequence[int], prompt_tokens: int, new_tokens: int, repeats: int) -> None:
    if not batch or min(batch) < 1:
        raise UsageError(f"batch sizes must be at least 1, not {', '.join(map(str, batch)) or 'none'}")
    for name, value, least in (
        ("prompt_tokens", prompt_tokens, 1),
        ("new_tokens", new_tokens, 2),
        ("repeats", repeats, 1),
    ):
        if value < least:
            raise UsageError(f"{name} must be at least {least}, not {value}")
    if repeats > MOST_REPEATS:
        raise UsageError(f"repeats must be at most {MOST_REPEATS}, not {repeats}")


def _load(asked: ModelConfig, config: EngineConfig, progress: Progress) -> _Loaded:
    """Load a model twice and time the second load; the first may export, lower and measure."""
    first = load_model(asked, max_slots=config.max_slots, progress=progress)
    asked = dataclasses.replace(asked, provider=first.provider)  # "auto" is replaced by the chosen provider
    weight_bytes = sum(graph_facts.bytes_per_step(read_onnx(graph)) for graph in first.graphs)
    notes = tuple(load_notes(first))
    first.close()
    del first
    gc.collect()
    reset_peak()
    start = time.perf_counter()
    _, engine = open_engine(asked, config, {}, owner="benchmark")
    return _Loaded(asked.provider, engine, time.perf_counter() - start, weight_bytes, notes)


def _measure_all(
    loaded: _Loaded, works: Sequence[Workload], repeats: int, gigabytes: float, tell: Progress
) -> tuple[list[dict[str, Any]], CarryallError | None]:
    """Return the results of the workloads, and the error that ended them early."""
    results: list[dict[str, Any]] = []
    for index, work in enumerate(works):
        samples = []
        for repeat in range(repeats + 1):
            gc.collect()
            try:
                samples.append(measure(loaded.engine, work, seed=repeat))
            except CarryallError as error:
                return results, error
            tell(index * (repeats + 1) + repeat + 1, len(works) * (repeats + 1), "")
        results.append(_summary(work, samples[1:], loaded, gigabytes))  # without the warm-up
    return results, None


def _summary(
    work: Workload, samples: Sequence[WorkloadRun], loaded: _Loaded, gigabytes: float
) -> dict[str, Any]:
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
