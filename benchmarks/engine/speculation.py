"""Compare speculative with plain decoding: two engines take turns on one loaded model.

    python benchmarks/engine/speculation.py [--model demo] [--method prompt-lookup] [--batch 1] \\
        [--rounds 9] [--kind copy] [--prompts 6] [--acceptance 0.7] [--json]

Three kinds of work, each of the same prompts for both engines:
    copy     greedy continuations of repetitive code
    prose    held-out code, sampled at temperature 1: few repetitions
    noise    random tokens, sampled at temperature 2: almost no repetitions
Measured is decoding only: from the first token of the last request to the last token, in tokens per second. A
row has medians over the rounds, and the median of the rounds' ratios. The engine that starts alternates by
round. On a machine under other load use ``--cpu-time --threads 1``: it counts CPU seconds of this process,
also in the controller of adaptive speculation.

``--acceptance`` replaces what a head proposes by tokens that are right so often (``forced_acceptance.py``):
what a trained head gains at the sizes of a model with random weights, and, with 0, what a head costs that is
always wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from copy_prompts import COPY_PROMPTS
from forced_acceptance import ForcedAcceptance

from carryall.exporter.demo import demo_path
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.engine.engine import Engine
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.models.loading import LoadedModel, load_model
from carryall.runtime.types.sampling_params import SamplingParams

_PROMPT_CHARACTERS = 700
_KINDS = ("copy", "prose", "noise")

Work = Sequence[tuple[list[int], SamplingParams]]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Result:
    """The speeds of both engines for one kind of work at one batch size."""

    kind: str
    batch: int
    plain: float  # tokens per second
    speculative: float  # tokens per second
    ratio: float  # median of the rounds' ratios
    worst: float  # smallest ratio of a round
    best: float  # largest ratio of a round
    acceptance_rate: float
    tokens_per_step: float


def works(model: LoadedModel, new_tokens: int) -> dict[str, Work]:
    """Return six prompts with their sampling parameters for each kind."""
    assert model.tokenizer is not None
    greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    copy = [(model.tokenizer.encode(text), greedy) for text in COPY_PROMPTS.values()]
    text = (demo_path() / "heldout.txt").read_text()
    places = np.linspace(0, len(text) - 2 * _PROMPT_CHARACTERS, len(copy)).astype(int).tolist()
    prose = [
        (
            model.tokenizer.encode(text[place : place + _PROMPT_CHARACTERS]),
            SamplingParams(temperature=1.0, seed=i, max_tokens=new_tokens, ignore_eos=True),
        )
        for i, place in enumerate(places)
    ]
    rng = np.random.default_rng(0)
    noise = [
        (
            rng.integers(0, model.runner.info.vocab_size, 200).tolist(),
            SamplingParams(temperature=2.0, seed=i, max_tokens=new_tokens, ignore_eos=True),
        )
        for i in range(len(copy))
    ]
    return {"copy": copy, "prose": prose, "noise": noise}


def tokens_per_second(
    engine: Engine, work: Work, batch: int, clock: Clock = time.perf_counter
) -> tuple[float, list[list[int]]]:
    """Return the decode speed over all of the work, ``batch`` requests at a time, and the tokens."""
    seconds, count, outputs = 0.0, 0, []
    for first in range(0, len(work), batch):
        requests = [Request(str(i), *each) for i, each in enumerate(work[first : first + batch], start=first)]
        for request in requests:
            engine.add(request)
        while not all(request.output_token_ids for request in requests):
            engine.step()
        begin, before = clock(), sum(len(request.output_token_ids) for request in requests)
        while engine.has_work:
            engine.step()
        seconds += clock() - begin
        count += sum(len(request.output_token_ids) for request in requests) - before
        outputs += [request.output_token_ids for request in requests]
    return count / seconds, outputs


def compare(
    model: LoadedModel,
    batches: Sequence[int],
    kinds: Sequence[str],
    config: EngineConfig,
    rounds: int,
    new_tokens: int,
    prompts: int,
    clock: Clock,
) -> Iterator[Result]:
    """Yield a result for each batch size and kind; the first round is a warm-up and not counted."""
    engines = {
        "plain": Engine(model.runner, config),
        "speculative": Engine(model.runner, config, model.proposer),
    }
    engines["speculative"].clock = clock
    for batch in batches:
        for kind, work in works(model, new_tokens).items():
            if kind not in kinds:
                continue
            work = work[:prompts]
            speeds: dict[str, list[float]] = {name: [] for name in engines}
            texts: dict[str, list[list[int]]] = {}
            for turn in range(rounds + 1):
                if turn == 1:
                    before = engines["speculative"].stats()
                for name in sorted(engines, reverse=bool(turn % 2)):
                    speed, texts[name] = tokens_per_second(engines[name], work, batch, clock)
                    speeds[name] += [speed] if turn else []
                    if isinstance(model.proposer, ForcedAcceptance) and name == "plain":
                        asked = zip(work, texts[name], strict=True)
                        model.proposer.texts = {str(i): [*p, *text] for i, ((p, _), text) in enumerate(asked)}
            if texts["plain"] != texts["speculative"]:
                print(f"note: {kind} at batch {batch}: the texts differ")
            stats = engines["speculative"].stats()
            proposed = stats.proposed_tokens - before.proposed_tokens
            accepted = stats.accepted_tokens - before.accepted_tokens
            generated = stats.generated_tokens - before.generated_tokens
            ratios = [s / p for p, s in zip(speeds["plain"], speeds["speculative"], strict=True)]
            yield Result(
                kind,
                batch,
                round(statistics.median(speeds["plain"]), 1),
                round(statistics.median(speeds["speculative"]), 1),
                round(statistics.median(ratios), 3),
                round(min(ratios), 3),
                round(max(ratios), 3),
                round(accepted / proposed, 3) if proposed else 0.0,
                round(generated / (stats.steps - before.steps), 2),
            )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--quantize")
    parser.add_argument("--method", default="prompt-lookup")
    parser.add_argument("--tokens", type=int, help="maximum number of proposed tokens per step")
    parser.add_argument("--kind", action="append", choices=_KINDS, help="default: all")
    parser.add_argument("--always", action="store_true", help="always propose, whether it saves time or not")
    parser.add_argument("--acceptance", type=float, metavar="RATE", help="make a head right so often")
    parser.add_argument("--batch", default="1", help="batch sizes, such as 1,4")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="0 lets the provider choose")
    parser.add_argument(
        "--cpu-time", action="store_true", help="measure CPU seconds of the process instead of wall time"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=6, help="number of prompts of each kind, at most 6")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    batches = [int(size) for size in options.batch.split(",")]
    model = load_model(
        options.model,
        provider=options.provider,
        quantize=options.quantize,
        max_slots=max(batches),
        context_length=512,
        num_threads=options.threads,
        speculative=options.method,
        num_speculative_tokens=options.tokens,
    )
    if options.acceptance is not None:
        assert model.proposer is not None
        model.proposer = ForcedAcceptance(model.proposer, options.acceptance)
    config = EngineConfig(prefix_cache=False, adaptive_speculation=not options.always)
    forced = "" if options.acceptance is None else f", acceptance {options.acceptance} forced"
    print(f"{options.model} on {options.provider}, {options.method}{forced}")
    print("kind    batch  plain tok/s  speculative  ratio (worst..best)  accepted  tokens a step")
    kinds = options.kind or _KINDS
    for result in compare(
        model, batches, kinds, config, options.rounds, options.new_tokens, options.prompts, clock
    ):
        if options.json:
            print(json.dumps(asdict(result)))
            continue
        print(
            f"{result.kind:<8}{result.batch:>5}{result.plain:>13.1f}{result.speculative:>13.1f}"
            f"{result.ratio:>7.2f} ({result.worst:.2f}..{result.best:.2f}){result.acceptance_rate:>10.0%}"
            f"{result.tokens_per_step:>15.2f}"
        )


if __name__ == "__main__":
    main()
