"""Measure KV eviction: perplexity and decode time of the engine with eviction and without.

    python benchmarks/engine/squeezed_kv.py demo --text exporter/demo/pycoder/heldout.txt --keep 256 \\
        --keep 128
    python benchmarks/engine/squeezed_kv.py MODEL --context 8000 --keep 1024

With --text, the engine decodes the second half of windows of the text token by token. A logits processor
forces the tokens of the text and records their log-probabilities. Other criteria of eviction replace the
provider's. With --context, random prompts of that length are continued and the engines take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from carryall.providers.kv import kv_blocks
from carryall.runtime.api.llm import LLM
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.engine.sampling.sampling_state import SamplingState
from carryall.runtime.types.sampling_params import SamplingParams

STEPS = 16  # steps of an engine before the next one's turn

Criterion = Callable[[npt.NDArray[Any], int], npt.NDArray[np.int64]]


class TeacherForcing:
    """Logits processor that forces the tokens of known texts and records their negative log-likelihoods."""

    def __init__(self, windows: npt.NDArray[np.int64]) -> None:
        self.windows = windows
        self.losses: list[float] = []

    def wants(self, params: SamplingParams) -> bool:
        """Return True: it processes all requests."""
        return True

    def apply(self, logits: npt.NDArray[np.float32], states: Sequence[SamplingState]) -> None:
        """Mask all logits [rows, vocabulary] except that of the text's next token."""
        for row, state in zip(logits, states, strict=True):
            known = len(state.prompt_token_ids) + len(state.output_token_ids)
            target = self.windows[state.params.extra_args["window"], known]
            scores = row.astype(np.float64) - row.max()
            self.losses.append(float(np.log(np.exp(scores).sum()) - scores[target]))
            row[:] = -np.inf
            row[target] = 0.0


def by_norm(sign: float) -> Criterion:
    """Keep keys with a large norm (1.0) or a small one (-1.0; Devoto et al., arXiv:2406.11430)."""

    def choose(keys: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
        norms = np.linalg.norm(keys.astype(np.float32), axis=-1)
        return np.sort(np.argsort(-sign * norms, axis=1)[:, :count], axis=1)

    return choose


def newest(keys: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Keep the newest keys: with sinks, this is StreamingLLM (Xiao et al., arXiv:2309.17453)."""
    return np.tile(np.arange(keys.shape[1] - count, keys.shape[1]), (len(keys), 1))


CRITERIA: dict[str, Criterion] = {
    "distinct keys": kv_blocks.distinct_keys,
    "large keys": by_norm(1.0),
    "newest": newest,
    "small keys": by_norm(-1.0),
}


def perplexity(
    model: str, windows: npt.NDArray[np.int64], keep: int | None, criterion: Criterion, **options: Any
) -> float:
    """Return the perplexity of the second halves of ``windows`` [n, tokens], decoded after the first."""
    reader = TeacherForcing(windows)
    half = windows.shape[1] // 2
    config = EngineConfig(logits_processors=(reader,), kv_eviction_tokens=keep)
    params = [
        SamplingParams(temperature=0.0, max_tokens=half, ignore_eos=True, extra_args={"window": n})
        for n in range(len(windows))
    ]
    kv_blocks.distinct_keys = criterion  # type: ignore[assignment]
    with LLM(model, max_slots=8, engine_config=config, **options) as llm:
        llm.generate(windows[:, :half].tolist(), params)
    return float(np.exp(np.mean(reader.losses)))


def decode_ms(
    model: str, context: int, batch: int, keeps: Sequence[int | None], rounds: int, **options: Any
) -> dict[int | None, float]:
    """Return milliseconds of a decode step after ``context`` tokens: medians over rounds, in turn."""
    llms = {keep: LLM(model, max_slots=batch, kv_eviction_tokens=keep, **options) for keep in keeps}
    steps = {keep: _steps(llm, context, batch) for keep, llm in llms.items()}
    times: dict[int | None, list[float]] = {keep: [] for keep in keeps}
    for own in steps.values():
        next(own)  # prefill
        next(own)  # eviction
    for _ in range(rounds):
        for keep, own in steps.items():
            begin = time.perf_counter()
            list(islice(own, STEPS))
            times[keep].append((time.perf_counter() - begin) / STEPS * 1e3)
    for llm in llms.values():
        llm.close()
    return {keep: statistics.median(own) for keep, own in times.items()}


def _steps(llm: LLM, context: int, batch: int) -> Iterator[None]:
    """Run the prompts, then one token of each stream per iteration."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=10**6, ignore_eos=True)
    prompts = rng.integers(5, 4000, (batch, context)).tolist()
    streams = [llm.stream(prompt, params) for prompt in prompts]
    while True:
        for stream in streams:
            next(stream)
        yield


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--keep", type=int, action="append", required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--context", type=int)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quantize")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--provider", default="cpu")
    parser.add_argument(
        "--criterion", action="append", choices=list(CRITERIA), help="may be repeated; default all"
    )
    given = parser.parse_args()
    options = {"quantize": given.quantize, "kv_cache_dtype": given.kv_cache_dtype, "provider": given.provider}
    if given.text is not None:
        with LLM(given.model, **options) as llm:
            ids = np.array(llm.encode(given.text.read_text(encoding="utf-8")), np.int64)
        windows = ids[: given.windows * given.width].reshape(-1, given.width)
        print(f"all kept: {perplexity(given.model, windows, None, kv_blocks.distinct_keys, **options):.3f}")
        for keep in given.keep:
            for name in given.criterion or CRITERIA:
                found = perplexity(given.model, windows, keep, CRITERIA[name], **options)
                print(f"{keep} kept, {name}: {found:.3f}", flush=True)
    if given.context is not None:
        keeps = [None, *given.keep]
        room = given.context + (given.rounds + 2) * STEPS
        times = decode_ms(
            given.model, given.context, given.batch, keeps, given.rounds, context_length=room, **options
        )
        for keep, milliseconds in times.items():
            print(f"{keep or 'all'} of {given.context} kept, batch {given.batch}: {milliseconds:.1f} ms")


if __name__ == "__main__":
    main()
