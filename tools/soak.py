"""Load a service for a long time, and check that memory, threads and open files stay flat.

    python tools/soak.py --minutes 30 [--model demo] [--streams 16]

Starts ``carryall serve MODEL``, sends completions, streams, chats, invalid requests and clients that vanish,
and prints a line of JSON every 10 s. The first fifth of the time is warm-up. Afterwards, the memory may grow
by ``--most-mib``, and the numbers of threads and files by 10 % and 8. The exit status is 1 if they grow more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil

SAMPLE_SECONDS = 10.0
MIB = 2**20


@dataclass
class Counts:
    """Answers by status, and the samples of the process."""

    statuses: dict[str, int] = field(default_factory=dict)
    samples: list[dict[str, float]] = field(default_factory=list)

    def add(self, status: int | str) -> None:
        """Count an answer."""
        self.statuses[str(status)] = self.statuses.get(str(status), 0) + 1


async def one(client: httpx2.AsyncClient, counts: Counts) -> None:
    """Send a random request."""
    kind = random.choice(("whole", "stream", "chat", "bad", "vanish"))
    body: dict[str, Any] = {"prompt": "def f(", "max_tokens": random.randint(1, 48), "ignore_eos": True}
    if kind == "chat":
        body = {"messages": [{"role": "user", "content": "x" * random.randint(1, 500)}], "max_tokens": 8}
    if kind == "bad":
        body |= random.choice(({"top_p": 7}, {"prompt": 3}, {"model": "none"}, {"n": 10**6}))
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    if kind in ("stream", "vanish"):
        async with client.stream("POST", path, json={**body, "stream": True}) as answer:
            async for _ in answer.aiter_bytes():
                if kind == "vanish":
                    break
            counts.add("vanished" if kind == "vanish" else answer.status_code)
        return
    counts.add((await client.post(path, json=body)).status_code)


async def load(url: str, until: float, counts: Counts) -> None:
    """Send requests one after the other, with new connections from time to time."""
    while time.monotonic() < until:
        async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
            for _ in range(50):
                if time.monotonic() >= until:
                    return
                try:
                    await one(client, counts)
                except httpx2.TransportError as error:  # such as a connection that both sides end at once
                    counts.add(type(error).__name__)
                    break


async def sample(process: psutil.Process, until: float, counts: Counts) -> None:
    """Print the state of the process at each interval."""
    start = time.monotonic()
    while time.monotonic() < until:
        await asyncio.sleep(min(SAMPLE_SECONDS, max(0.1, until - time.monotonic())))
        found = {
            "seconds": round(time.monotonic() - start, 1),
            "mib": round(process.memory_info().rss / MIB, 1),
            "threads": process.num_threads(),
            "files": process.num_fds(),
        }
        counts.samples.append(found)
        print(json.dumps({**found, "answers": counts.statuses}), flush=True)


def wrong_answers(statuses: dict[str, int]) -> list[str]:
    """Return the errors of the server, and the broken connections if they are more than 1 in 1,000."""
    found = [f"{n} answers with status {status}" for status, n in statuses.items() if status.startswith("5")]
    broken = {name: n for name, n in statuses.items() if name.endswith("Error")}
    if 1000 * sum(broken.values()) > sum(statuses.values()):
        found.append(f"broken connections: {broken}")
    return found


def faults(samples: list[dict[str, float]], most_mib: float) -> list[str]:
    """Return what grew after the warm-up; the ends are means of a tenth of the samples."""
    flat = samples[len(samples) // 5 :]
    if len(flat) < 2:
        return ["the run was too short for 2 samples"]
    share = max(1, len(flat) // 10)
    found = []
    for name, most in (("mib", most_mib), ("threads", None), ("files", None)):
        first, last = (sum(one[name] for one in part) / share for part in (flat[:share], flat[-share:]))
        allowed = 0.1 * first + 8 if most is None else most
        if last - first > allowed:
            found.append(f"{name} grew from {first:.1f} to {last:.1f}; {allowed:.1f} more are allowed")
    return found


async def soak(url: str, process: psutil.Process, minutes: float, streams: int) -> Counts:
    """Load the service, and return what was counted."""
    counts, until = Counts(), time.monotonic() + 60 * minutes
    await asyncio.gather(sample(process, until, counts), *[load(url, until, counts) for _ in range(streams)])
    return counts


def main(arguments: list[str]) -> int:
    """Run the soak and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--most-mib", type=float, default=32)
    given = parser.parse_args(arguments)
    command = [sys.executable, "-m", "carryall", "serve", given.model, "--json"]
    command += ["--http-port", "0", "--grpc-port", "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            ready = process.stdout.readline() if process.stdout else "{}"
            url = f"http://{json.loads(ready)['http']}"
            counts = asyncio.run(soak(url, psutil.Process(process.pid), given.minutes, given.streams))
            wrong = faults(counts.samples, given.most_mib) + wrong_answers(counts.statuses)
        finally:
            process.terminate()
    print(json.dumps({"answers": counts.statuses, "faults": wrong}))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
