"""Simulate services over measured costs of steps: time between tokens and to the first, tokens a second.

    python tools/fleet_simulator.py check result.json  # of benchmarks/one_service.py or prefill_decode.py
    python tools/fleet_simulator.py plan --costs 11,1.8,5,1.6 --rate 12 --prompt 1000 --services 8
    python tools/fleet_simulator.py loop --costs 11,1.8,0,1.6 --streams 8 --prompt 256 --answer 64

Discrete events: each service has carryall's own scheduler on a clock that steps advance by what they cost, a
linear function of decode rows, prompts, prompt tokens and the keys that all tokens attend to. ``check`` fits
it to the steps that the benchmark measured. ``plan`` takes milliseconds of a step, a row, a prompt and a
prompt token, sends requests at random times (Poisson) to the service with the fewest, and prints what they
see. With ``--prefill N``, so many of the services compute prompts for the others. ``loop`` gives one service
so many streams, each of which sends its next request after its last answer; ``--backlog`` changes how much
waiting requests weigh (``_BACKLOG``).
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from carryall.runtime.engine.kv.slots import SlotTable
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.sampling.sampler import Sample
from carryall.runtime.engine.schedule import scheduler
from carryall.runtime.engine.schedule.scheduler import Scheduler
from carryall.runtime.types.sampling_params import SamplingParams

CHUNK = 64  # tokens that move between services at a time
RESTORE_BESIDE, RESTORE_ALONE = 0.02, 0.2  # seconds of a step for chunks, as in the engine


class Facts(NamedTuple):
    """What a step has: decode rows, prompts, tokens of prompts, and keys that its tokens attend to."""

    rows: int
    prompts: int
    tokens: int
    keys: int

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int]]) -> Facts:
        """Return the facts of rows, each as its number of tokens and the position of the first one."""
        rows = list(rows)
        prompts = [length for length, _ in rows if length > 1]
        keys = sum(length * start + length * (length + 1) // 2 for length, start in rows)
        return cls(len(rows) - len(prompts), len(prompts), sum(prompts), keys)


@dataclass(frozen=True)
class Costs:
    """Seconds of a step, of a decode row, a prompt, a prompt token, a key of a token, and a restored chunk.

    ``ratios`` are those of measured steps to what the costs say, of steps without and with prompts: steps
    vary by them, in random order.
    """

    step: float
    row: float
    prompt: float
    token: float
    key: float = 0.0
    chunk: float = 0.0
    ratios: tuple[tuple[float, ...], tuple[float, ...]] = ((1.0,), (1.0,))

    def of(self, facts: Facts) -> float:
        """Return the seconds of a step."""
        each = (self.row, self.prompt, self.token, self.key)
        once = self.step * (facts.rows + facts.prompts > 0)
        return once + sum(cost * fact for cost, fact in zip(each, facts, strict=True))

    @classmethod
    def fitted(cls, steps: Sequence[tuple[Sequence[tuple[int, int]], float]], chunk: float = 0.0) -> Costs:
        """Fit costs to measured steps (the rows, as of ``Facts.of``, and the seconds), none of them below 0.

        Errors count relative to what a step is expected to take. Relative to what it took, long steps would
        count less than short ones, and all costs would be too low (iteratively reweighted least squares).
        """
        facts = np.array([[1, *Facts.of(rows)] for rows, _ in steps], float)
        seconds = np.array([each for _, each in steps])
        expected = seconds
        for _ in range(_ROUNDS):
            costs = _least_squares(facts / expected[:, None], seconds / expected)
            expected = facts @ costs
        ratios = seconds / expected
        prompts = facts[:, 2] > 0
        plain, long = (tuple(ratios[of].tolist()) or (1.0,) for of in (~prompts, prompts))
        return cls(*costs.tolist(), chunk, (plain, long))


_ROUNDS = 8  # of the fit; after four its costs change by less than 0.1 %


def _least_squares(facts: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> Any:
    """Return the costs with the least squared error, none below 0: the most negative are left out."""
    kept = list(range(facts.shape[1]))
    while True:
        found = np.linalg.lstsq(facts[:, kept], seconds, rcond=None)[0]
        if (found >= 0).all():
            costs = np.zeros(facts.shape[1])
            costs[kept] = found
            return costs
        kept.pop(int(found.argmin()))


@dataclass
class Ask:
    """A request: when it comes, its tokens, and the times of its own tokens."""

    arrival: float
    prompt: int
    answer: int
    times: list[float] = field(default_factory=list)
    done: Callable[[float], None] = lambda now: None


class Service:
    """One engine on a simulated clock.

    Args:
        costs: of its steps.
        slots: the most requests at a time.
        step_tokens: the most tokens of a step.
    """

    def __init__(self, costs: Costs, slots: int, step_tokens: int = 512) -> None:
        self.costs, self.tokens = costs, 0
        self.runs = False  # whether a step is in progress
        self.scheduler = Scheduler(SlotTable(slots), step_tokens, stretch=2.25)
        self.asks: dict[Request, Ask] = {}
        self.restoring: list[tuple[Ask, int]] = []  # chunks that are still to be read, by request
        self._number, self._rng = 0, random.Random(0)

    @property
    def load(self) -> int:
        """The requests that it has."""
        return len(self.asks) + len(self.restoring)

    def add(self, ask: Ask, stored: int = 0) -> None:
        """Take a request; the first ``stored`` tokens of its prompt are in the tier."""
        if stored >= CHUNK:
            self.restoring.append((ask, stored // CHUNK))
            return
        self._queue(ask, ask.prompt)

    def _queue(self, ask: Ask, tokens: int) -> None:
        self._number += 1
        params = SamplingParams(temperature=0.0, max_tokens=ask.answer, ignore_eos=True)
        request = Request(str(self._number), [1] * max(1, tokens), params)
        self.asks[request] = ask
        self.scheduler.add(request)

    def step(self, now: float) -> tuple[float, list[Ask]]:
        """Run one step; return when it ends, and the requests that end with it."""
        ended = []
        plan = self.scheduler.plan()
        facts = Facts.of((len(row.tokens), row.start) for row in plan.rows)
        seconds = self.costs.of(facts) * self._rng.choice(self.costs.ratios[facts.prompts > 0])
        end = now + self._restore(RESTORE_BESIDE if plan.rows else RESTORE_ALONE) + seconds
        self.scheduler.learn(plan, seconds)
        self.scheduler.commit(plan)
        for row, request in zip(plan.rows, plan.requests, strict=True):
            if not row.num_logits:
                continue
            request.append(Sample(1))
            ask = self.asks[request]
            ask.times.append(end)
            self.tokens += 1
            if len(request.output_token_ids) >= ask.answer:
                request.finish("length")
                self.scheduler.remove(request, keep=False)
                del self.asks[request]
                ended.append(ask)
        return end, ended

    def _restore(self, most: float) -> float:
        """Read chunks for so many seconds, at least one; return the seconds it took."""
        spent = 0.0
        while self.restoring and spent < most:
            ask, left = self.restoring.pop(0)
            spent += self.costs.chunk
            if left > 1:
                self.restoring.insert(0, (ask, left - 1))
            else:
                self._queue(ask, ask.prompt - ask.prompt // CHUNK * CHUNK)
        return spent


class Simulation:
    """Events in order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0

    def at(self, when: float, act: Callable[[float], None]) -> None:
        """Run ``act`` at a time."""
        self._count += 1
        heapq.heappush(self._events, (when, self._count, act))

    def give(self, service: Service, ask: Ask, stored: int = 0) -> None:
        """Give a service a request, and wake it."""
        service.add(ask, stored)
        if not service.runs:
            service.runs = True
            self._run(service, self.now)

    def run(self, until: float) -> None:
        """Run all events up to a time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act(self.now)

    def _run(self, service: Service, now: float) -> None:
        service.runs = service.load > 0
        if not service.runs:
            return
        end, ended = service.step(now)
        end = max(end, now + 1e-6)
        for ask in ended:
            self.at(end, ask.done)
        self.at(end, lambda end: self._run(service, end))


def between(asks: Sequence[Ask], since: float) -> list[float]:
    """Return the seconds between the tokens of answers, from a time on, sorted."""
    pairs = (pair for ask in asks for pair in zip(ask.times, ask.times[1:], strict=False))
    return sorted(b - a for a, b in pairs if a > since)


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values."""
    return values[int(share * len(values))] if values else float("nan")


def trial(decode: Costs, prefill: Costs | None, options: Any) -> dict[str, float]:
    """Simulate one round of benchmarks/prefill_decode.py; return what it reports."""
    simulation, end = Simulation(), options.seconds
    service = Service(decode, 8)
    server = None if prefill is None else Service(prefill, 8)
    asks: list[Ask] = []
    firsts: list[Ask] = []

    def stream(now: float) -> None:
        if now < end:
            asks.append(Ask(now, options.stream_tokens, options.answer_tokens, done=stream))
            simulation.give(service, asks[-1])

    def prompt(now: float) -> None:
        ask = Ask(now, options.prompt_tokens, 1)
        firsts.append(ask)
        if server is None:
            simulation.give(service, ask)
            return
        # The server's answer is the end of its only token.
        remote = Ask(now, ask.prompt, 1, done=lambda _: simulation.give(service, ask, ask.prompt))
        simulation.give(server, remote)

    for _ in range(options.streams):
        simulation.at(0.0, stream)
    when = 1.0
    while options.every and when + options.every < end:
        simulation.at(when, prompt)
        when += options.every
    simulation.run(end + 60.0)
    times = between([dataclasses.replace(ask, times=[t for t in ask.times if t < end]) for ask in asks], 1.0)
    reached = [ask.times[0] - ask.arrival for ask in firsts if ask.times]
    return {
        "between_ms_p50": 1000 * statistics.median(times),
        "between_ms_p99": 1000 * quantile(times, 0.99),
        "first_token_s_p50": statistics.median(reached) if reached else float("nan"),
        "first_token_s_p90": quantile(sorted(reached), 0.9),
    }


_LONGER = 10  # times as long as measured, so that chance in the simulation hardly counts


def check(path: Path) -> bool:
    """Compare predictions with what a benchmark measured; print both; return whether all agree to 15 %."""
    result = json.loads(path.read_text())
    lacking = [name for name in ("options", "stream_prompt_tokens") if name not in result]
    if lacking:
        sys.exit(f"{path} is not the result of one run of the benchmark: it has no {lacking[0]}")
    read = {name: float(value) for name, value in result["options"].items() if _is_number(value)}
    options = argparse.Namespace(
        seconds=_LONGER * read["seconds"],
        every=read["every"],
        streams=int(read["streams"]),
        prompt_tokens=result["prompt_tokens"],
        stream_tokens=result["stream_prompt_tokens"],
        answer_tokens=result.get("stream_answer_tokens", 1000),
    )
    fitted = {}
    if toy := result["options"].get("toy"):
        step, row, token = (float(each) / 1000 for each in toy.split(","))
        fitted = dict.fromkeys(("together", "apart"), Costs(step, row, 0.0, token, chunk=0.001))
        result["costs"] = {}
    for name, runs in result["costs"].items():
        steps = [step for run in runs for step in run["steps"]]
        chunk = statistics.median(run["write_chunk_s"] for run in runs)
        fitted[name] = Costs.fitted(steps, chunk)
        print(
            name,
            {
                field.name: round(1000 * getattr(fitted[name], field.name), 4)
                for field in dataclasses.fields(Costs)
                if field.name != "ratios"
            },
            "ms",
        )
    predicted = {"together": trial(fitted["together"], None, options)}
    if "apart" in fitted:
        predicted["apart"] = trial(fitted["apart"], fitted["apart"], options)
    good = True
    for name, values in predicted.items():
        for key, value in values.items():
            if key not in result[name]:  # of a few prompts there is no p90
                continue
            ratio = value / result[name][key]
            good &= abs(ratio - 1.0) <= 0.15
            print(f"{name} {key}: predicted {value:.2f}, measured {result[name][key]:.2f}, ratio {ratio:.2f}")
    return good


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def plan(options: argparse.Namespace) -> dict[str, float]:
    """Simulate a fleet; return what requests see."""
    rng, simulation = random.Random(options.seed), Simulation()
    step, row, prompt, token, *chunk = (float(each) / 1000 for each in options.costs.split(","))
    costs = Costs(step, row, prompt, token, chunk=chunk[0] if chunk else 0.0)
    services = [Service(costs, options.slots, options.step_tokens) for _ in range(options.services)]
    servers, others = services[: options.prefill], services[options.prefill :]
    asks: list[Ask] = []

    def fewest(among: list[Service]) -> Service:
        return min(among, key=lambda service: service.load)

    def arrive(now: float) -> None:
        length = lambda mean: max(1, int(rng.expovariate(1.0 / mean)))  # noqa: E731
        ask = Ask(now, length(options.prompt), length(options.answer))
        asks.append(ask)
        if servers and ask.prompt >= CHUNK:
            back = lambda _: simulation.give(fewest(others), ask, ask.prompt)  # noqa: E731
            simulation.give(fewest(servers), Ask(now, ask.prompt, 1, done=back))
        else:
            simulation.give(fewest(others), ask)
        following = now + rng.expovariate(options.rate)
        if following < options.seconds:
            simulation.at(following, arrive)

    simulation.at(0.0, arrive)
    simulation.run(options.seconds)
    warm = [ask for ask in asks if ask.arrival > 0.2 * options.seconds]
    firsts = sorted(ask.times[0] - ask.arrival for ask in warm if ask.times)
    times = between(warm, 0.0)
    return {
        "requests": len(asks),
        "unanswered": sum(not ask.times for ask in warm),
        "tokens_s": sum(service.tokens for service in others) / options.seconds,
        "first_token_s_p50": quantile(firsts, 0.5),
        "first_token_s_p95": quantile(firsts, 0.95),
        "between_ms_p50": 1000 * quantile(times, 0.5),
        "between_ms_p99": 1000 * quantile(times, 0.99),
    }


def loop(options: argparse.Namespace) -> dict[str, float]:
    """Simulate streams that each send their next request after their last answer; return what they see."""
    simulation, asks, rng = Simulation(), list[Ask](), random.Random(0)

    def length(mean: int) -> int:
        return rng.randint(max(1, mean // 2), max(1, 3 * mean // 2))

    service = Service(Costs(*(float(each) / 1000 for each in options.costs.split(","))), options.streams)

    def send(now: float) -> None:
        if now < options.seconds:
            asks.append(Ask(now, length(options.prompt), length(options.answer), done=send))
            simulation.give(service, asks[-1])

    for number in range(options.streams):
        simulation.at(0.01 * number, send)
    simulation.run(options.seconds)
    since = 0.1 * options.seconds
    times = between(asks, since)
    firsts = sorted(ask.times[0] - ask.arrival for ask in asks if ask.times and ask.arrival > since)
    return {
        "tokens_s": sum(time > since for ask in asks for time in ask.times) / (options.seconds - since),
        "first_token_s_p50": quantile(firsts, 0.5),
        "first_token_s_p95": quantile(firsts, 0.95),
        "between_ms_p95": 1000 * quantile(times, 0.95),
    }


def main() -> None:
    """Read the command line and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    checked = commands.add_parser("check")
    checked.add_argument("result", type=Path)
    planned = commands.add_parser("plan")
    planned.add_argument("--costs", required=True, help="milliseconds: step,row,prompt,token[,chunk]")
    planned.add_argument("--rate", type=float, required=True, help="requests a second")
    planned.add_argument("--prompt", type=float, default=1000.0, help="mean tokens of a prompt")
    planned.add_argument("--answer", type=float, default=200.0, help="mean tokens of an answer")
    planned.add_argument("--services", type=int, default=1)
    planned.add_argument("--prefill", type=int, default=0)
    planned.add_argument("--slots", type=int, default=32)
    planned.add_argument("--step-tokens", type=int, default=2048)
    planned.add_argument("--seconds", type=float, default=120.0)
    planned.add_argument("--seed", type=int, default=0)
    looped = commands.add_parser("loop")
    looped.add_argument("--costs", required=True, help="milliseconds: step,row,prompt,token")
    looped.add_argument("--streams", type=int, required=True)
    looped.add_argument("--prompt", type=int, default=256, help="mean tokens of a prompt, from a half to 3/2")
    looped.add_argument("--answer", type=int, default=64, help="the same of an answer")
    looped.add_argument("--seconds", type=float, default=300.0)
    looped.add_argument("--backlog", type=float, default=scheduler._BACKLOG)  # noqa: SLF001
    options = parser.parse_args()
    if options.command == "loop":
        scheduler._BACKLOG = options.backlog  # noqa: SLF001
        print(json.dumps({key: round(value, 4) for key, value in loop(options).items()}, indent=1))
        return
    if options.command == "check":
        raise SystemExit(0 if check(options.result) else 1)
    print(json.dumps({key: round(value, 3) for key, value in plan(options).items()}, indent=1))


if __name__ == "__main__":
    main()
