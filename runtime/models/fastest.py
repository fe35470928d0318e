"""``provider="auto"``: measure the model on all providers and choose the fastest.

A provider whose devices do not hold the model is measured with its layers split over them and the CPU.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import CarryallError, ProviderUnavailableError
from ...progress import Progress
from ...providers import get_provider, provider_names
from ...providers.base import Provider, Row, Runner, RunnerConfig
from ...providers.host.machine import describe_machine
from ...records import dataclass
from ...storage.cache import cache_key, cached_folder
from ...storage.writing import writing
from .layer_places import candidate, names_places, placed_layers
from .lowering import lowered_model
from .model_source import SourceModel
from .split import is_split, split_runner

AUTO = "auto"

_log = logging.getLogger(__name__)
_FILE = "fastest.json"
_PROMPT_TOKENS, _NEW_TOKENS, _REPEATS = 32, 8, 3


@dataclass(frozen=True, slots=True)
class Trial:
    """The measurement of one provider.

    Args:
        provider: the provider's name, or the places of a split.
        seconds: for a prompt of 32 tokens and 8 generated tokens, the best of 3; None if it cannot run.
        reason: why it cannot run.
    """

    provider: str
    seconds: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FastestProvider:
    """The fastest provider or places, and the measurements of all."""

    provider: str
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        said = [
            f"{trial.provider} {1e3 * trial.seconds:.1f} ms"
            if trial.seconds is not None
            else f"{trial.provider} cannot run it ({trial.reason})"
            for trial in self.trials
        ]
        work = f"{_PROMPT_TOKENS} + {_NEW_TOKENS} tokens"
        return f"provider {self.provider} is the fastest for this model; {work}: {', '.join(said)}"


def fastest_provider(
    files: SourceModel,
    config: RunnerConfig,
    candidates: Sequence[Provider] | None = None,
    progress: Progress | None = None,
) -> FastestProvider:
    """Measure the model on every provider that is available; the result is cached.

    Args:
        files: the model; it is lowered for each provider.
        config: the options of the runner.
        candidates: the providers to measure; None takes all that are available.
        progress: called for every tensor written while lowering.

    Raises:
        ProviderUnavailableError: no provider can run the model; the message has all reasons.
    """
    if candidates is None:
        everyone = [get_provider(name) for name in provider_names()]
        candidates = [one for one in everyone if one.runs_models and one.available() is None]
    machine = describe_machine()
    tried = [(candidate(files, provider, config), provider) for provider in candidates]
    key = cache_key(
        model=files.content_key,
        providers=[where for where, _ in tried],
        config=dataclasses.asdict(config),
        machine=(machine.system, machine.cpu, machine.usable_cores),
    )

    def build(folder: Path) -> None:
        trials = [_try(where, provider, files, config, progress) for where, provider in tried]
        if all(trial.seconds is None for trial in trials):  # not kept: memory may be free later
            reasons = "; ".join(f"{trial.provider}: {trial.reason}" for trial in trials)
            raise ProviderUnavailableError(
                f"no provider can run {files.name}: {reasons or 'none is available; see carryall doctor'}"
            )
        with writing(folder / _FILE):
            (folder / _FILE).write_text(json.dumps([dataclasses.asdict(trial) for trial in trials]))

    kept = json.loads((cached_folder("fastest", key, build, {"model": files.name}) / _FILE).read_text())
    trials = tuple(Trial(**trial) for trial in kept)
    working = [(trial.seconds, trial.provider) for trial in trials if trial.seconds is not None]
    choice = FastestProvider(min(working)[1], trials)
    _log.info("%s", choice)
    return choice


def _try(
    where: str, provider: Provider, files: SourceModel, config: RunnerConfig, progress: Progress | None
) -> Trial:
    try:
        runner = _opened(where, provider, files, config, progress)
        try:
            seconds = min(_generate_seconds(runner) for _ in range(_REPEATS))
        finally:
            runner.close()
    except CarryallError as error:
        return Trial(where, None, str(error))
    return Trial(where, seconds)


def _opened(
    where: str, provider: Provider, files: SourceModel, config: RunnerConfig, progress: Progress | None
) -> Runner:
    if names_places(where):
        placed = placed_layers(files, where, config).provider
        if is_split(placed):
            return split_runner(files, placed, config, progress)[0]
    return provider.runner(lowered_model(files, provider, config, progress), config)


def _generate_seconds(runner: Runner) -> float:
    """Return the seconds for one sequence of made-up tokens."""
    room = runner.info.context_length
    prompt = np.arange(max(1, min(_PROMPT_TOKENS, room - _NEW_TOKENS))) % runner.info.vocab_size
    begin = time.perf_counter()
    runner.forward([Row(0, prompt.astype(np.int64), 0)])
    for position in range(len(prompt), min(len(prompt) + _NEW_TOKENS, room)):
        runner.forward([Row(0, prompt[:1].astype(np.int64), position)])
    seconds = time.perf_counter() - begin
    runner.release(0)
    return seconds
