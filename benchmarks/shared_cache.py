"""What a prefix costs that another service has computed: the time to the first token, by where its KV is.

    python benchmarks/shared_cache.py MODEL --tokens 4096 --question 1 --question 128 --prompts 3 --turns 12

Services (``carryall serve``) share a server of the Redis protocol (valkey-server or redis-server), which this
script starts. The first one computes prompts. Two others are asked over HTTP for the same prompts with a
question of further tokens behind each, in turns: one has no tier but the store, the other has host memory
above it. *store* and *host memory* are asked after another prompt has taken the slot, *slot* is the second
one asked once more. Ratios are the median of the turns' ratios for elapsed time, and that of the means for
processor time, since a service's clock counts in 10 ms.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import redis

_QUIET = 1.0  # seconds without a new chunk, after which all are written


class Cost(NamedTuple):
    """Milliseconds of a first token: elapsed, and of processors of the service and of the store."""

    elapsed: float
    service: float
    store: float


def prompt(number: int, tokens: int) -> list[int]:
    """Return the tokens of a prompt, which differ from the first one on."""
    return [(number * 7919 + place * 104_729) % 1000 + 100 for place in range(tokens)]


class Store:
    """A server of the Redis protocol.

    Args:
        folder: of its socket.
    """

    def __init__(self, folder: str) -> None:
        server = shutil.which("valkey-server") or shutil.which("redis-server")
        if server is None:
            sys.exit("install valkey-server or redis-server")
        self.name = Path(server).name
        socket = Path(folder, "store.sock")
        command = [server, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not socket.exists():
            time.sleep(0.05)
        self.url, self._client = f"unix://{socket}", redis.Redis(unix_socket_path=str(socket))

    def settle(self) -> None:
        """Wait until no further chunk is written."""
        count, since = -1, time.monotonic()
        while time.monotonic() < since + _QUIET:
            if (now := self._client.dbsize()) != count:
                count, since = now, time.monotonic()
            time.sleep(0.05)

    @property
    def processors(self) -> float:
        """Return the seconds of processors it has used; its clock is finer than the system's."""
        facts: Any = self._client.info("cpu")
        return float(facts["used_cpu_user"]) + float(facts["used_cpu_sys"])


class Service:
    """A service with one slot, whose tiers are host memory and the store.

    Args:
        process: the service.
        address: of its HTTP port.
        store: the store.
    """

    def __init__(self, process: subprocess.Popen[str], address: str, store: Store) -> None:
        self._process, self._address, self._store = psutil.Process(process.pid), address, store

    def ask(self, tokens: Sequence[int]) -> tuple[Cost, int]:
        """Return what the first token takes, and how many tokens of the prompt were in a cache."""
        body = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}, "return_token_ids": True}  # fmt: skip
        connection = http.client.HTTPConnection(self._address, timeout=600)
        connection.connect()
        used, stored, begun = self._processors(), self._store.processors, time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            sys.exit(f"{self._address} answered {answer.status}: {answer.read()!r}")
        elapsed = cached = 0.0
        while line := answer.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"] and event["choices"][0].get("token_ids"):
                elapsed = elapsed or time.perf_counter() - begun
            if usage := event.get("usage"):
                cached = usage["prompt_tokens_details"]["cached_tokens"]
        connection.close()
        spent = (elapsed, self._processors() - used, self._store.processors - stored)
        return Cost(*(1000 * each for each in spent)), int(cached)

    def _processors(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def served(args: argparse.Namespace, store: Store, host_bytes: str) -> Iterator[Service]:
    """Start a service with so much host memory for KV, and end it."""
    command = [sys.executable, "-m", "carryall", "serve", args.model, "--json"]
    ports = ["--http-port", "0", "--grpc-port", "none"]
    limits = [
        "--max-slots",
        "1",
        "--context-length",
        str(args.tokens + 64 + max(args.question)),
        "--num-threads",
        str(args.threads),
    ]
    tiers = ["--prefix-cache-dir", "none", "--prefix-cache-url", store.url, "--swap-bytes", host_bytes]
    environment = {"CARRYALL_KV_KEY": "the key of this benchmark", **os.environ}
    process = subprocess.Popen(
        [*command, *ports, *limits, *tiers], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if '"http"' in line), "")
        if not line:
            sys.exit("a service ended before it was ready")
        yield Service(process, str(json.loads(line)["http"]), store)
    finally:
        process.terminate()
        process.wait()


def turned(
    reader: Service, holder: Service, store: Store, own: Sequence[int], question: int, turn: int
) -> dict[str, tuple[Cost, int]]:
    """Return what a question costs in a turn, by where the KV of the prompt is."""
    for service in (reader, holder):
        service.ask([7, 8])  # takes the slot
    store.settle()
    ways = {"store": reader, "host memory": holder}
    ordered = [*(ways.items() if turn % 2 else reversed(ways.items())), ("slot", holder)]
    # No two questions behind a prompt begin alike, so that no more than the prompt is in a cache.
    firsts = (9 + 3 * turn + place for place in range(len(ordered)))
    return {
        name: service.ask([*own, first, *prompt(first, question)[1:]])
        for first, (name, service) in zip(firsts, ordered, strict=True)
    }


def measured(
    first: Service, reader: Service, holder: Service, store: Store, args: argparse.Namespace
) -> dict[tuple[int, str], list[Cost]]:
    """Return the costs by question and way; the first prompt and the first turn of each prompt warm up."""
    costs: dict[tuple[int, str], list[Cost]] = {(0, "computed"): []}
    for number in range(args.prompts + 1):
        own = prompt(number, args.tokens)
        computed, _ = first.ask(own)
        costs[0, "computed"] += [computed] * bool(number)
        store.settle()
        for turn in range(args.turns + 1):
            for index, question in enumerate(args.question):
                ways = turned(reader, holder, store, own, question, turn * len(args.question) + index)
                for name, (_, cached) in ways.items():
                    if cached != args.tokens:
                        print(f"{name}: {cached} tokens were cached", file=sys.stderr)
                if number and turn and all(cached == args.tokens for _, cached in ways.values()):
                    for name, (cost, _) in ways.items():
                        costs.setdefault((question, name), []).append(cost)
    return costs


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument(
        "--question", type=int, action="append", help="tokens behind the prefix, several times (1)"
    )
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--turns", type=int, default=12, help="of each prompt")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.question = args.question or [1]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = Store(folder)
        stack.callback(store.process.wait)
        stack.callback(store.process.terminate)
        services = [stack.enter_context(served(args, store, size)) for size in ("0", "0", "4GB")]
        costs = measured(services[0], services[1], services[2], store, args)
    print(f"{args.tokens} tokens, {store.name}, milliseconds: median (quartiles), least tenth, mean")
    for (question, name), values in costs.items():
        behind = f" + {question}" if question else ""
        for kind, each in zip(("", ", processors", ", store"), zip(*values, strict=True), strict=True):
            ordered, count = sorted(each), len(each)
            tenth, low, middle, high = (ordered[int(count * share)] for share in (0.1, 0.25, 0.5, 0.75))
            print(
                f"{name}{behind}{kind} ({count}): {middle:.0f} ({low:.0f} to {high:.0f}), {tenth:.0f}, ",
                end="",
            )
            print(f"{statistics.mean(each):.1f}")
    for question in args.question:
        for other in ("host memory", "slot"):
            pairs = list(zip(costs[question, "store"], costs[question, other], strict=True))
            elapsed = statistics.median(mine.elapsed / its.elapsed for mine, its in pairs)
            mine, its = (
                statistics.mean(cost.service for cost in costs[question, way]) for way in ("store", other)
            )
            print(f"+ {question}: store / {other}: elapsed {elapsed:.2f}, processors {mine / its:.2f}")


if __name__ == "__main__":
    main()
