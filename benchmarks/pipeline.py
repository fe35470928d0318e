"""What the stages of a pipeline wait for: the shares of time in which they compute.

    python benchmarks/pipeline.py MODEL --stages 2 --streams 8 --new-tokens 64 --rounds 5

On a Ray cluster of this machine (or at ``--pipeline ADDRESS``), each stage has one thread. *in flight* is the
runner as it is; *one by one* lets a step pass one stage after the other. Both are measured in turns, beside
the whole model in one process with one thread. The bubble is the share of the time in which a stage waits.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

from carryall import LLM, SamplingParams
from carryall.runtime.models.pipeline import RayPipeline

_numbers = itertools.count()


def measured(llm: LLM, streams: int, words: int, new_tokens: int) -> tuple[float, list[float]]:
    """Return the tokens a second of new prompts, and the share of the time in which each stage computed."""
    prompts = [f"{next(_numbers)} " + "the value of a name " * (words // 5) for _ in range(streams)]
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    runner = llm.engine.runner
    stages = runner if isinstance(runner, RayPipeline) else None
    before = stages.busy_seconds if stages else []
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - begun
    time.sleep(0.2)  # for the last answers of the stages
    busy = (
        [(after - was) / seconds for was, after in zip(before, stages.busy_seconds, strict=True)]
        if stages
        else []
    )
    tokens = sum(len(output.prompt_token_ids) + new_tokens for output in outputs)
    return tokens / seconds, busy


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pipeline", default="local")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-words", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    work = args.streams, args.prompt_words, args.new_tokens
    options = {"num_threads": 1, "max_slots": args.streams}
    found: dict[str, list[tuple[float, list[float]]]] = {"one process": [], "in flight": [], "one by one": []}
    with (
        LLM(args.model, **options) as whole,
        LLM(args.model, pipeline=args.pipeline, pipeline_stages=args.stages, **options) as llm,
    ):
        runner = llm.engine.runner
        assert isinstance(runner, RayPipeline)
        for number in range(args.rounds + 1):
            one = measured(whole, *work)
            flying = measured(llm, *work)
            batches, runner.batches = runner.batches, 1
            single = measured(llm, *work)
            runner.batches = batches
            if number:  # the first round warms up
                for name, result in zip(found, (one, flying, single), strict=True):
                    found[name].append(result)
    for name, results in found.items():
        rates = [rate for rate, _ in results]
        line = f"{name}: {statistics.median(rates):.1f} tokens/s ({min(rates):.1f}..{max(rates):.1f})"
        if results[0][1]:
            busy = [
                statistics.median(shares) for shares in zip(*(shares for _, shares in results), strict=True)
            ]
            waits = 1 - statistics.fmean(busy)
            shares = ", ".join(f"{share:.2f}" for share in busy)
            line += f", stages compute {shares} of the time, bubble {waits:.2f}"
        print(line)


if __name__ == "__main__":
    main()
