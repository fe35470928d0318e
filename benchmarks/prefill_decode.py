"""What prefill and decode apart give streams: time between their tokens while long prompts arrive.

    python benchmarks/prefill_decode.py MODEL --every 6 --streams 3 --rounds 3 -o OUT.json

*together* is one service on the given processors; *apart* is a prefill server on the last of them and a
decode service on the others, with a store in memory between them. Both run all the time, asked in turns, so
that the idle one costs nothing and other load of the machine meets both. Each round, streams generate for
``--seconds``, and a prompt that no cache knows arrives every ``--every`` seconds. Reported are the median and
the p99 of the time between tokens of the streams, and the median time to the first token of the prompts.

``--costs`` also measures what a step costs on the processors of each service, for tools/fleet_simulator.py.
With ``--toy STEP,ROW,TOKEN`` the services run carryall's toy model, whose steps take so many milliseconds by
sleeping: that measures scheduling and the hand-over, whatever else a machine does.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import itertools
import json
import os
import platform
import random
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WORDS = ["the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as", "by", "at", "from"]


@dataclasses.dataclass
class Measured:
    """Seconds between tokens of streams, and to the first token of prompts."""

    between: list[float] = dataclasses.field(default_factory=list)
    first: list[float] = dataclasses.field(default_factory=list)


def pinned(processors: list[int]) -> list[str]:
    """Return the start of a command that runs on some processors only."""
    return [str(shutil.which("taskset")), "-c", ",".join(map(str, processors))]


def toy_options(costs: str) -> list[str]:
    """Return the options of a service of the toy model; none without costs."""
    if not costs:
        return []
    named = zip(("step", "row", "token"), costs.split(","), strict=True)
    values = [f"{name}_seconds={float(ms) / 1000}" for name, ms in named]
    return ["--provider", "null", *(word for value in values for word in ("--provider-option", value))]


def started(
    model: str, processors: list[int], folder: Path, *options: str
) -> tuple[subprocess.Popen[str], str]:
    """Start a service on some processors; return its process and its address."""
    command = [sys.executable, "-m", "carryall", "serve", model, "--http-port", "0", "--grpc-port", "none"]
    environment = {**os.environ, "CARRYALL_KV_KEY": "a key of the benchmark only"}
    limits = ["--num-threads", str(len(processors)), "--prefix-cache-dir", "none", "--max-slots", "8"]
    process = subprocess.Popen(
        [*pinned(processors), *command, *limits, "--json", *options],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
    )
    assert process.stdout is not None
    line = next((line for line in process.stdout if '"ready"' in line), "")
    if not line:
        raise SystemExit("a service ended before it was ready")
    return process, str(json.loads(line)["http"])


def stream(address: str, prompt: str, tokens: int, until: float) -> list[float]:
    """Return the times at which the tokens of an answer came, until a time."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": False}, "return_token_ids": True}  # fmt: skip
    connection = http.client.HTTPConnection(address, timeout=300)
    times = [time.perf_counter()]
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    if answer.status != http.HTTPStatus.OK:
        raise SystemExit(f"{address} answered {answer.status}: {answer.read()!r}")
    while (line := answer.readline()) and time.perf_counter() < until:
        now = time.perf_counter()
        # Tokens that end within a character have no text, but an event of their own.
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0].get("token_ids"):
            times.append(now)
    connection.close()
    return times


def text_of(words: int) -> str:
    """Return a text of so many words that no cache knows."""
    return secrets.token_hex(4) + " " + " ".join(random.choices(WORDS, k=words))


def tokens_of(address: str, text: str) -> int:
    """Return the number of tokens of a text."""
    connection = http.client.HTTPConnection(address)
    connection.request("POST", "/tokenize", json.dumps({"prompt": text}))
    return int(json.loads(connection.getresponse().read())["count"])


def measure(address: str, options: argparse.Namespace, measured: Measured) -> None:
    """Run one round on a service."""
    end = time.perf_counter() + options.seconds
    results: list[list[float]] = []

    def streams() -> None:
        while time.perf_counter() < end:
            results.append(stream(address, text_of(20), 1000, end))

    threads = [threading.Thread(target=streams) for _ in range(options.streams)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    begin = time.perf_counter()
    firsts: list[threading.Thread] = []
    while options.every and time.perf_counter() + options.every < end:

        def ask() -> None:
            times = stream(address, text_of(options.prompt_words), 1, float("inf"))
            measured.first.append(times[1] - times[0])

        firsts.append(threading.Thread(target=ask))
        firsts[-1].start()
        time.sleep(options.every)
    for thread in [*threads, *firsts]:
        thread.join()
    for times in results:
        pairs = itertools.pairwise(times[1:])
        measured.between += [b - a for a, b in pairs if a > begin]


def summary(measured: Measured) -> dict[str, Any]:
    """Return what is reported of a service."""
    between = sorted(measured.between)
    return {
        "tokens": len(between),
        "between_ms_p50": round(1000 * statistics.median(between), 2),
        "between_ms_p99": round(1000 * between[int(0.99 * len(between))], 2),
        "first_token_s_p50": round(statistics.median(measured.first), 3) if measured.first else None,
        "prompts": len(measured.first),
    }


COSTS = """
import json, sys, time, numpy as np
from carryall import LLM
from carryall.providers.base import Row
model, threads = sys.argv[1], int(sys.argv[2])
llm = LLM(model, num_threads=threads, max_slots=8, prefix_cache_dir=None)
runner, rng = llm.engine.runner, np.random.default_rng(0)
steps, most = [], runner.info.vocab_size
def run(rows, prompts, length):
    tokens = [rng.integers(5, most, n) for n in [1] * rows + [length] * prompts]
    starts = [200] * rows + [0] * prompts
    begin = time.perf_counter()
    runner.forward([Row(i, t, s, 1) for i, (t, s) in enumerate(zip(tokens, starts))])
    seconds = time.perf_counter() - begin
    return [(len(t), s) for t, s in zip(tokens, starts)], seconds
for slot in range(8):
    runner.forward([Row(slot, rng.integers(5, most, 200), 0)])
for _ in range(6):
    for rows, prompts, length in ((1, 0, 0), (2, 0, 0), (4, 0, 0), (6, 0, 0), (0, 1, 64), (0, 1, 256),
                                  (3, 1, 8), (3, 1, 16), (3, 1, 32), (1, 1, 8), (1, 1, 32)):
        steps.append(run(rows, prompts, length))
        if prompts:
            runner.release(rows); runner.forward([Row(rows, rng.integers(5, most, 200), 0)])
parts = runner.read_kv(0, 0, 64)
kept = [p.copy() for p in parts]
begin = time.perf_counter()
for _ in range(20):
    runner.write_kv(7, 0, 64, kept)
print(json.dumps({"steps": steps, "write_chunk_s": (time.perf_counter() - begin) / 20,
                  "chunk_bytes": sum(p.nbytes for p in kept)}))
"""


def costs(model: str, processors: list[int]) -> Any:
    """Measure steps of a runner on some processors, in a process of its own."""
    command = [*pinned(processors), sys.executable, "-c", COSTS]
    text = subprocess.run([*command, model, str(len(processors))], check=True, capture_output=True, text=True)
    return json.loads(text.stdout.splitlines()[-1])


def main() -> None:
    """Read the command line, run the rounds in turns, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="MODEL")
    parser.add_argument("--processors", default="0,1")
    parser.add_argument("--prompt-words", type=int, default=800)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between prompts; 0 sends none")
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--costs", action="store_true")
    parser.add_argument("--toy", default="", metavar="STEP,ROW,TOKEN", help="milliseconds")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    processors = [int(each) for each in options.processors.split(",")]
    scratch = Path(tempfile.mkdtemp(dir="/dev/shm"))
    processes: list[subprocess.Popen[str]] = []
    measured = {"together": Measured(), "apart": Measured()}
    result: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}
    result["machine"] = {"processor": platform.processor(), "load": os.getloadavg(), "python": sys.version}
    try:
        toy = toy_options(options.toy)
        store = [*toy, "--prefix-cache-url", f"file://{scratch}/kv"]
        processes.append((one := started(options.model, processors, scratch, *toy))[0])
        processes.append(
            (two := started(options.model, processors[-1:], scratch, "--role", "prefill", *store))[0]
        )
        decode = ["--role", "decode", "--prefill-server", f"http://{two[1]}", *store]
        processes.append((three := started(options.model, processors[:-1], scratch, *decode))[0])
        result["prompt_tokens"] = tokens_of(one[1], text_of(options.prompt_words))
        result["stream_prompt_tokens"] = tokens_of(one[1], text_of(20))
        rounds: list[dict[str, Any]] = []
        all_costs: dict[str, list[Any]] = {"together": [], "apart": []}
        for number in range(-1, options.rounds):  # the first one warms up
            for name, address, own in (
                ("together", one[1], processors),
                ("apart", three[1], processors[:-1]),
            ):
                fresh = Measured()
                if options.costs and number >= 0:
                    all_costs[name].append(costs(options.model, own))
                measure(address, options, fresh)
                if number >= 0:
                    measured[name].between += fresh.between
                    measured[name].first += fresh.first
                    rounds.append({"service": name, **summary(fresh)})
                    print(json.dumps(rounds[-1]), flush=True)
        connection = http.client.HTTPConnection(three[1])
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        result["prefills"] = [line for line in lines if line.startswith("carryall:prefills")]
        result |= {"rounds": rounds, "costs": all_costs}
        result |= {name: summary(each) for name, each in measured.items()}
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait()
        shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps({name: result[name] for name in measured} | {"prefills": result["prefills"]}, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
