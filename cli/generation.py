"""What ``run`` and ``chat`` share: loading a model, writing text as it comes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from ..graph_opt.quantize.methods import METHODS
from ..providers.placement import Placement
from ..runtime.errors import ProviderRuntimeError
from ..runtime.llm import LLM
from ..runtime.loading import LoadedModel, load_model
from ..runtime.outputs import RequestOutput
from ..runtime.requests import Prompt
from ..runtime.sampling_params import SamplingParams
from .progress import progress

quantize_option = click.option(
    "--quantize", type=click.Choice(list(METHODS)), help="Quantize first, in the cache."
)
context_option = click.option(
    "--context-length", type=click.IntRange(1), help="Longest sequence; the model's own by default."
)
kv_cache_option = click.option(
    "--kv-cache",
    type=click.Choice(["int8", "float32"]),
    help="Type of the KV cache; by default int8 where the model was quantized with --kv int8.",
)
speculative_option = click.option(
    "--speculative",
    metavar="METHOD",
    help="Propose tokens to check several at a time: prompt-lookup, or draft:MODEL with a smaller model of "
    "the same tokenizer. Changes the speed, not the text.",
)
num_speculative_option = click.option(
    "--num-speculative-tokens", type=click.IntRange(1), help="Most tokens proposed at a time."
)


def open_model(
    name: str,
    provider: str,
    quantize: str | None,
    context_length: int | None = None,
    *,
    kv_cache: str | None = None,
    speculative: str | None = None,
    num_speculative_tokens: int | None = None,
    provider_options: Mapping[str, Any] | None = None,
    ep_library: str | None = None,
    allow_fallback: bool = False,
    slots: int = 1,
    quiet: bool = False,
) -> LoadedModel:
    """Load a model; preparing it for the provider shows progress."""
    with progress("prepare", quiet=quiet) as tell:
        loaded = load_model(
            name,
            provider=provider,
            quantize=quantize,
            context_length=context_length,
            max_slots=slots,
            kv_cache=kv_cache,
            speculative=speculative,
            num_speculative_tokens=num_speculative_tokens,
            provider_options=provider_options,
            ep_library=ep_library,
            allow_fallback=allow_fallback,
            progress=tell,
        )
    if loaded.choice is not None and not quiet:
        click.echo(str(loaded.choice), err=True)
    tell_fallbacks(loaded.fallbacks)
    return loaded


def tell_fallbacks(fallbacks: Sequence[Placement]) -> None:
    """Say on stderr where nodes lie, of models that may and do fall back to the CPU."""
    for placed in fallbacks:
        click.echo(f"some nodes fell back:\n{placed}", err=True)


def stream_text(llm: LLM, prompt: Prompt, params: SamplingParams) -> Iterator[tuple[str, RequestOutput]]:
    """Yield each new piece of text, with the state of the whole.

    Raises:
        ProviderRuntimeError: the run failed.
    """
    written = 0
    for output in llm.stream(prompt, params):
        if output.error is not None:
            raise ProviderRuntimeError(output.error)
        text = output.outputs[0].text
        yield text[written:], output
        written = len(text)


def speed(output: RequestOutput) -> dict[str, float]:
    """Return seconds to the first token and, after it, tokens per second."""
    metrics, tokens = output.metrics, len(output.outputs[0].token_ids)
    if metrics is None or metrics.first_token is None:
        return {"time_to_first_token": 0.0, "tokens_per_second": 0.0}
    elapsed = (metrics.finished or time.monotonic()) - metrics.first_token
    rate = (tokens - 1) / elapsed if tokens > 1 and elapsed > 0 else 0.0
    return {"time_to_first_token": metrics.first_token - metrics.arrival, "tokens_per_second": rate}


def speed_line(output: RequestOutput) -> str:
    """Return tokens and speed in words."""
    found = speed(output)
    return (
        f"{len(output.outputs[0].token_ids)} tokens, {found['tokens_per_second']:.1f} tokens/s, "
        f"first after {found['time_to_first_token'] * 1e3:.0f} ms"
    )
