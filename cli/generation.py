"""Load a model, and stream text; shared by ``run`` and ``chat``."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from ..providers.placement import Placement
from ..runtime.api.llm import LLM
from ..runtime.api.requests import ChatPrompt, Prompt
from ..runtime.models.config import ModelConfig
from ..runtime.models.loading import LoadedModel, load_model
from ..runtime.process.garbage import collector_paused
from ..runtime.types.outputs import CompletionOutput, RequestOutput
from ..runtime.types.sampling_params import SamplingParams
from ..storage.texts import read_text
from .pictures import Shown
from .progress import PREPARE, progress


def open_model(
    model: str | ModelConfig, *, max_slots: int = 1, quiet: bool = False, **fields: Any
) -> LoadedModel:
    """Load a model as ``load_model`` does, with progress on stderr."""
    with progress(PREPARE, quiet=quiet) as tell, collector_paused():
        loaded = load_model(model, max_slots=max_slots, progress=tell, **fields)
    for reason in (loaded.choice, loaded.placed):
        if reason is not None and not quiet:
            click.echo(str(reason), err=True)
    tell_fallbacks(loaded.fallbacks)
    return loaded


def tell_fallbacks(fallbacks: Sequence[Placement]) -> None:
    """Print on stderr which nodes fell back to the CPU."""
    for placed in fallbacks:
        click.echo(f"some nodes fell back:\n{placed}", err=True)


def only_lora(config: ModelConfig) -> str | None:
    """Return the name of the LoRA adapter that all requests use, None if none is given.

    Raises:
        UsageError: there are several.
    """
    names = list(config.loras)
    if len(names) > 1:
        raise UsageError(f"--lora is given for {', '.join(names)}; this command uses one adapter")
    return names[0] if names else None


def stream_text(
    llm: LLM, prompt: Prompt, params: SamplingParams, lora: str | None = None
) -> Iterator[tuple[str, RequestOutput]]:
    """Yield each new piece of text, with the whole output so far; ``lora`` is the name of an adapter.

    Raises:
        InvalidSamplingError, ProviderRuntimeError: the request failed; see ``RequestOutput.check``.
    """
    before: CompletionOutput | None = None
    for output in llm.stream(prompt, params, lora=lora):
        output.check()
        newest = output.outputs[0] if output.outputs else None
        yield newest.since(before).text if newest is not None else "", output
        before = newest


def speed(output: RequestOutput) -> dict[str, float]:
    """Return seconds to the first token and, after it, tokens per second."""
    metrics, tokens = output.metrics, len(output.outputs[0].token_ids)
    if metrics is None or metrics.first_token is None:
        return {"time_to_first_token": 0.0, "tokens_per_second": 0.0}
    elapsed = (metrics.finished or time.monotonic()) - metrics.first_token
    rate = (tokens - 1) / elapsed if tokens > 1 and elapsed > 0 else 0.0
    return {"time_to_first_token": metrics.first_token - metrics.arrival, "tokens_per_second": rate}


def speed_line(output: RequestOutput) -> str:
    """Return the number of tokens and the speed as text."""
    found = speed(output)
    return (
        f"{len(output.outputs[0].token_ids)} tokens, {found['tokens_per_second']:.1f} tokens/s, "
        f"first token after {found['time_to_first_token'] * 1e3:.0f} ms"
    )


def user_message(text: str, shown: Sequence[Shown]) -> dict[str, Any]:
    """Return a message of the user; pictures come before the text."""
    pictures = [file.part for file in shown]
    return {"role": "user", "content": [*pictures, {"type": "text", "text": text}] if pictures else text}


def chat_prompt(llm: LLM, message: str, tools: Path | None, shown: Sequence[Shown] = ()) -> ChatPrompt:
    """Render a message, and the functions of a file, with the model's chat template."""
    functions = None if tools is None else _functions(tools)
    return llm.requests.chat_prompt([user_message(message, shown)], tools=functions)


def unparsed(prompt: ChatPrompt) -> ChatPrompt:
    """Return a prompt whose answer is one text, with reasoning and calls."""
    return dataclasses.replace(prompt, new_parser=lambda: None)


def _functions(path: Path) -> list[dict[str, Any]]:
    try:
        functions = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(functions, list) or not all(isinstance(each, dict) for each in functions):
        raise UsageError(f"{path} must hold a list of objects, one per function")
    return functions
