"""What streams see on one engine while prompts arrive, in processor time, for tools/fleet_simulator.py.

    python benchmarks/one_service.py MODEL --streams 3 --prompt-tokens 512 --every 3 --rounds 3 -o OUT.json

The engine runs in this process with one thread, and its clock is the processor time of the process, which
other load of the machine hardly changes; arrivals go by that clock too. Each round first measures what steps
cost, under other loads than the one that is predicted: streams alone, from one to six, and short prompts
beside them. Then streams generate while a prompt that no cache knows arrives every ``--every`` seconds.
``fleet_simulator.py check`` predicts the second part from the first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from carryall import LLM, SamplingParams
from carryall.runtime.engine.requests.request import Request

# Streams, and tokens of the prompts beside them.
CALIBRATED = ((1, 0), (2, 0), (4, 0), (6, 0), (1, 64), (3, 128), (5, 256), (2, 400))

CALIBRATION = 1.25  # processor seconds of each: short and often, since the machine is now slower, now faster

ANSWER = 128  # tokens of an answer of a stream: steps cost about the same at both ends of it


@dataclass
class Seen:
    """Steps as (rows, seconds), times of tokens by request, and arrivals.

    A row is its number of tokens and the position of the first one.
    """

    steps: list[tuple[list[tuple[int, int]], float]] = field(default_factory=list)
    times: dict[Request, list[float]] = field(default_factory=dict)
    arrivals: dict[Request, float] = field(default_factory=dict)


class Load:
    """An engine under a load, on the clock of processor time.

    Args:
        engine: an engine without work.
        vocab_size: token ids are below it.
        seed: of the tokens of all texts.
    """

    def __init__(self, engine: Any, vocab_size: int, seed: int) -> None:
        self.engine, self._vocab = engine, vocab_size
        self._rng, self._number = np.random.default_rng(seed), 0
        self._rows: list[tuple[int, int]] = []
        submit = engine.runner.submit

        def counted(rows: Any) -> Any:
            self._rows = [(len(row.tokens), row.start) for row in rows]
            return submit(rows)

        engine.runner.submit = counted

    def run(self, streams: int, prompt: int, every: float, seconds: float, stream_prompt: int) -> Seen:
        """Keep streams going for some seconds, and let prompts arrive; then end all requests."""
        seen, begin, due = Seen(), time.process_time(), min(1.0, every)
        alive: set[Request] = set()
        while (now := time.process_time() - begin) < seconds:
            while len(alive) < streams:
                alive.add(self._add(seen, stream_prompt, ANSWER, now))
            while prompt and due <= now and due + every < seconds:
                self._add(seen, prompt, 1, due)
                due += every
            self._rows = []
            news = self.engine.step()
            ended = time.process_time() - begin
            if self._rows:
                seen.steps.append((self._rows, round(ended - now, 6)))
            for request in news:
                if request.error is not None:
                    raise SystemExit(f"a request failed: {request.error}")
                seen.times[request] += [ended] * (len(request.output_token_ids) - len(seen.times[request]))
                alive -= {request} if request.finish_reason else set()
        for request in seen.times:
            self.engine.cancel(request.request_id)
        while self.engine.has_work:
            self.engine.step()
        return seen

    def _add(self, seen: Seen, tokens: int, answer: int, now: float) -> Request:
        self._number += 1
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        ids = self._rng.integers(5, self._vocab, tokens).tolist()
        request = Request(f"r{self._number}", ids, params)
        seen.times[request], seen.arrivals[request] = [], now
        self.engine.add(request)
        return request


def summary(runs: list[Seen]) -> dict[str, float]:
    """Return what streams and prompts saw, as ``fleet_simulator.trial`` does."""
    between, firsts = [], []
    for seen in runs:
        for request, times in seen.times.items():
            if request.params.max_tokens == 1:
                firsts += [times[0] - seen.arrivals[request]] if times else []
            else:
                between += [b - a for a, b in itertools.pairwise(times) if a > 1.0]
    between.sort()
    return {
        "between_ms_p50": 1000 * statistics.median(between),
        "between_ms_p99": 1000 * between[int(0.99 * len(between))],
        "first_token_s_p50": statistics.median(firsts),
        "first_token_s_p90": sorted(firsts)[int(0.9 * len(firsts))],
    }


def main() -> None:
    """Read the command line, run the rounds, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="MODEL")
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--stream-tokens", type=int, default=24, help="prompt tokens of a stream")
    parser.add_argument("--every", type=float, default=3.0, help="processor seconds between prompts")
    parser.add_argument("--seconds", type=float, default=20.0, help="processor seconds of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the tokens of all texts")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    time.perf_counter = time.process_time  # the engine learns by it what prompts cost
    llm = LLM(options.model, num_threads=1, max_slots=8, prefix_cache_dir=None)
    load = Load(llm.engine, llm.engine.runner.info.vocab_size, options.seed)
    costs, runs = list[Any](), list[Seen]()
    for _ in range(options.rounds):
        for streams, prompt in CALIBRATED:
            costs += load.run(streams, prompt, 0.3, CALIBRATION, options.stream_tokens).steps[1:]
        runs.append(
            load.run(
                options.streams, options.prompt_tokens, options.every, options.seconds, options.stream_tokens
            )
        )
    result = {
        "options": {name: str(value) for name, value in vars(options).items() if name != "output"}
        | {"model": Path(options.model).name},
        "machine": f"{platform.machine()}, processor time of one thread",
        "prompt_tokens": options.prompt_tokens,
        "stream_prompt_tokens": options.stream_tokens,
        "stream_answer_tokens": ANSWER,
        "costs": {"together": [{"steps": costs, "write_chunk_s": 0.0}]},
        "together": {name: round(value, 4) for name, value in summary(runs).items()},
    }
    llm.close()
    if options.output:
        options.output.write_text(json.dumps(result, separators=(",", ":")))
    print(json.dumps({"together": result["together"], "steps": len(costs)}))


if __name__ == "__main__":
    main()
