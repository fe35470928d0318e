"""The checks of a self-test: values of a model against the reference, memory, and speed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...contract import IMAGE_STATES
from ...errors import CarryallError, ProviderRuntimeError
from ...graph_opt.graph.onnx_files import read_onnx
from ...graph_opt.graph.saving import save_model
from ...graph_opt.pipeline.pipeline import run
from ...records import dataclass
from ...storage.scratch import scratch_folder
from ..base import Provider, Row, Runner, RunnerConfig
from ..lowering import lowered

Logits = npt.NDArray[np.float32]
ModelMaker = Callable[[], ir.Model]

SLOTS = 3
_PROMPTS = (16, 64, 256)  # tokens; the largest that takes a moment is timed
_PROMPT_SECONDS = 4.0
_TIMED_SECONDS, _TIMED_STEPS = 2.0, 100
_READERS_OF_ROWS = frozenset({"Gather", "GatherBlockQuantized"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a self-test.

    Attributes:
        area: what it is about.
        name: what was checked: ``qwen3 int4``, ``compute=bf16``.
        status: ``refused``: the provider states that it cannot do this, with the reason in ``detail``.
            ``skipped``: not run, with the reason in ``detail``.
        seconds: with lowering, loading and compilation.
        detail: why it was refused or skipped, or the error of a failure.
        figures: what was measured, by name with unit.
    """

    area: Literal["values", "options", "memory", "speed"]
    name: str
    status: Literal["passed", "failed", "refused", "skipped"]
    seconds: float = 0.0
    detail: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the check as JSON types."""
        return dataclasses.asdict(self)


def checked(area: Any, name: str, measure: Callable[[], tuple[bool, Mapping[str, float]]]) -> Check:
    """Run a check and return its result; an error of a run, or one that has no type of ours, is a failure.

    Args:
        area: as in ``Check``.
        name: as in ``Check``.
        measure: returns whether it passed, and the figures.
    """
    start = time.perf_counter()

    def finished(status: Any, detail: str = "", figures: Mapping[str, float] | None = None) -> Check:
        seconds = round(time.perf_counter() - start, 3)
        return Check(
            area=area, name=name, status=status, seconds=seconds, detail=detail, figures=figures or {}
        )

    try:
        passed, figures = measure()
    except ProviderRuntimeError as error:
        return finished("failed", str(error))
    except CarryallError as error:
        return finished("refused", str(error))
    except Exception as error:  # noqa: BLE001 -- the self-test reports whatever a device raises
        return finished("failed", f"{type(error).__name__}: {' '.join(str(error).split())}")
    return finished("passed" if passed else "failed", "" if passed else "outside of the tolerance", figures)


def difference(got: Logits, expected: Logits) -> float:
    """Return the root of the mean squared error of logits as a share of the root mean square of both; or inf.

    It is 0 for equal logits, and about 1.4 for unrelated ones.
    """
    if not np.isfinite(got).all():
        return float("inf")
    error = np.linalg.norm(got.astype(np.float64) - expected)
    return float(error * 2**0.5 / np.hypot(np.linalg.norm(got), np.linalg.norm(expected)))


def logits_of(provider: Provider, make_model: ModelMaker, context: int, options: Mapping[str, Any]) -> Logits:
    """Lower and open a model, and return the logits [n, vocab_size] of prompts, decode steps and copies."""
    config = RunnerConfig(max_slots=SLOTS, context_length=context, options=dict(options))
    with opened(provider, make_model, config) as (runner, _):
        return drive(runner)


def tower_states(
    provider: Provider,
    make_tower: ModelMaker,
    feeds: Mapping[str, npt.NDArray[Any]],
    options: Mapping[str, Any],
) -> Logits:
    """Lower and open a tower; return its rows [n, hidden_size] for pictures."""
    config = provider.resolve_options(RunnerConfig(options=dict(options)))
    with scratch_folder() as folder:
        path = folder / "model.onnx"
        tower = make_tower()
        passes = provider.tower_passes(config, tower) or provider.model_passes()
        save_model(run(tower, passes)[0], path)
        states: Logits = provider.session(path, config).run([IMAGE_STATES], dict(feeds))[0]
        return np.array(states)


@contextmanager
def opened(provider: Provider, make_model: ModelMaker, config: RunnerConfig) -> Iterator[tuple[Runner, Path]]:
    """Lower a portable model for a provider and open it; yield the runner and the lowered file."""
    config = provider.resolve_options(config)
    with scratch_folder() as folder:
        path = folder / "model.onnx"
        save_model(lowered(provider, config, lambda way: run(make_model(), way.passes)[0]), path)
        runner = provider.runner(path, config)
        try:
            yield runner, path
        finally:
            runner.close()


def drive(runner: Runner) -> Logits:
    """Run two sequences together and alone, a copy of a prefix, a prompt that reuses a slot, two new prompts.

    Args:
        runner: with ``SLOTS`` slots and a context of 64 tokens.

    Returns:
        The logits of all steps, [n, vocab_size].
    """
    vocab = runner.info.num_tokens or runner.info.vocab_size
    first, second, third = np.random.default_rng(0).integers(1, vocab, (3, 48))
    rows_of_logits: list[Logits] = []

    def step(*rows: Row) -> None:
        rows_of_logits.extend(logits.copy() for logits in runner.forward(rows))

    kept = (10,) if runner.info.state_bytes else ()  # where a recurrent state is copied
    step(Row(0, first[:20], 0, 4, checkpoints=kept))
    step(Row(1, second[:9], 0))
    for count in range(4):  # the first run may be captured, later ones replay it
        step(
            Row(0, first[20 + count : 21 + count], 20 + count, checkpoints=kept),
            Row(1, second[9 + count : 10 + count], 9 + count),
        )
    step(Row(0, first[24:29], 24, 5, checkpoints=kept))
    runner.copy_prefix(0, 2, 10)
    step(Row(2, third[10:11], 10), Row(1, second[13:14], 13))
    runner.release(0)
    step(Row(0, third[:40], 0, 2))
    step(Row(0, third[40:41], 40))
    runner.release(0)
    runner.release(1)
    step(Row(0, second[:17], 0), Row(1, first[:20], 0))
    step(Row(0, second[17:18], 17), Row(1, first[20:21], 20))
    return np.concatenate(rows_of_logits)


def memory_figures(
    provider: Provider, make_model: ModelMaker, context: int, options: Mapping[str, Any]
) -> tuple[bool, Mapping[str, float]]:
    """Open a model that asks for twice the free memory, use it, and look whether its memory comes back.

    Returns:
        Whether fewer slots were offered and at most 5 % of the memory is missing afterwards; the figures.

    Raises:
        CarryallError: the model could not be opened or used.
    """
    config = RunnerConfig(max_slots=1, context_length=context, options=dict(options))
    token = np.array([1], np.int64)
    with opened(provider, make_model, config) as (runner, _):  # what a first use allocates for good
        runner.forward([Row(0, token, 0)])
        per_slot = runner.info.kv_bytes_per_token * context
    free = provider.free_memory(options) or 0
    wanted = 2 * free // per_slot + 1
    with opened(provider, make_model, dataclasses.replace(config, max_slots=wanted)) as (runner, _):
        slots = runner.info.max_slots
        runner.forward([Row(slots - 1, token, 0)])
        held = free - (provider.free_memory(options) or 0)
    lost = free - (provider.free_memory(options) or 0)
    figures = {
        "free_bytes": free,
        "slots_wanted": wanted,
        "slots_offered": slots,
        "kv_bytes": slots * per_slot,
        "held_bytes": held,
        "lost_bytes": lost,
    }
    return slots < wanted and lost <= 0.05 * free, figures


def speed_figures(
    provider: Provider, make_model: ModelMaker, options: Mapping[str, Any]
) -> tuple[bool, Mapping[str, float]]:
    """Time a prompt and decode steps of one sequence and of several; return the figures.

    ``bandwidth_share`` is the share of the memory's bandwidth with which a step of one sequence reads its
    weights: the limit of its speed. It is missing if the provider does not know the bandwidth.
    """
    start = time.perf_counter()
    config = RunnerConfig(max_slots=8, context_length=2 * _PROMPTS[-1], options=dict(options))
    with opened(provider, make_model, config) as (runner, path):
        loaded = time.perf_counter() - start
        read = _bytes_read(path)
        size, prompt = _timed_prompt(runner)
        slots = runner.info.max_slots
        seconds = _seconds_per_step(runner, [size] + [0] * (slots - 1), 1)
        many = _seconds_per_step(runner, [size] + [0] * (slots - 1), slots)
    figures = {
        "load_seconds": loaded,
        "prompt_tokens": size,
        "prompt_tokens_per_second": size / prompt,
        "decode_tokens_per_second": 1 / seconds,
        f"decode_tokens_per_second_of_{slots}": slots / many,
        "weight_bytes": float(read),
        "weight_bytes_per_second": read / seconds,
    }
    bandwidth = provider.memory_bandwidth(options)
    if bandwidth is not None:
        figures |= {"bandwidth_bytes_per_second": bandwidth, "bandwidth_share": read / seconds / bandwidth}
    return True, figures


def _timed_prompt(runner: Runner) -> tuple[int, float]:
    """Return the tokens and the seconds of a prompt; a slow device gets a short one."""
    tokens = np.random.default_rng(0).integers(1, runner.info.vocab_size, _PROMPTS[-1])
    size, seconds = 0, 0.0
    for size, longer in zip(_PROMPTS, (*_PROMPTS[1:], 0), strict=True):
        for _ in range(2):  # the first run compiles what the device compiles for its shape
            start = time.perf_counter()
            runner.forward([Row(0, tokens[:size], 0)])
            seconds = time.perf_counter() - start
        if seconds * longer / size > _PROMPT_SECONDS:
            break
    return size, seconds


def _seconds_per_step(runner: Runner, held: list[int], rows: int) -> float:
    """Return the median time of a decode step over the first ``rows`` slots."""
    token, taken = np.array([1], np.int64), []
    end = time.perf_counter() + _TIMED_SECONDS
    for step in range(_TIMED_STEPS):
        start = time.perf_counter()
        runner.forward([Row(slot, token, held[slot] + step) for slot in range(rows)])
        taken.append(time.perf_counter() - start)
        if time.perf_counter() > end and step > 2:
            break
    return float(np.median(taken[2:]))  # the first may be captured


def _bytes_read(path: Path) -> int:
    """Return the bytes of weights that a step of one token reads: all but tables of which it takes a row."""
    graph = read_onnx(path).graph
    return sum(
        value.const_value.nbytes
        for value in graph.initializers.values()
        if value.const_value is not None
        and any(node.op_type not in _READERS_OF_ROWS for node in value.consumers())
    )
