"""Load a service for a long time, and check that memory, threads and open files stay flat.

    python tools/soak.py --minutes 30 [--model demo] [--streams 16]
    python tools/soak.py --models FOLDER --model A,B [--embedder C] [--seeing D] --streams 200

Starts ``carryall serve``, sends requests of all APIs (OpenAI's completions, chats, responses and embeddings,
Anthropic's messages, Ollama's, gRPC), streams, pictures, invalid requests and clients that vanish, and prints
a line of JSON every 10 s. The first fifth of the time is warm-up. Afterwards, the memory may grow
by ``--most-mib``, and the numbers of threads and files by 10 % and 8. The exit status is 1 if they grow more.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil

from carryall.client.aio import AsyncClient
from carryall.errors import CarryallError

Request = dict[str, Any]
BAD: tuple[Request, ...] = ({"top_p": 7}, {"prompt": 3}, {"model": "none"}, {"n": 10**6})
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


@dataclass
class Service:
    """A server's addresses, and the models of each kind."""

    url: str
    grpc: str
    writers: list[str]
    embedders: list[str]
    seeing: list[str]

    def requests(self) -> dict[str, tuple[str, Request]]:
        """A random request of each API, with its path."""
        model, count, words = random.choice(self.writers), random.randint(1, 48), "x" * random.randint(1, 500)
        said = [{"role": "user", "content": words}]
        found: dict[str, tuple[str, Request]] = {
            "completion": ("/v1/completions", {"prompt": "def f(", "max_tokens": count, "ignore_eos": True}),
            "chat": ("/v1/chat/completions", {"messages": said, "max_tokens": 8}),
            "response": ("/v1/responses", {"input": words, "max_output_tokens": 16, "store": False}),
            "message": ("/v1/messages", {"messages": said, "max_tokens": 8}),
            "ollama chat": ("/api/chat", {"messages": said, "options": {"num_predict": 8}}),
            "ollama generate": ("/api/generate", {"prompt": words, "options": {"num_predict": 8}}),
            "bad": ("/v1/completions", {"prompt": "x", **random.choice(BAD)}),
        }
        for path, body in found.values():
            body.setdefault("model", model)
            body["stream"] = path != "bad" and random.random() < 0.5
        found["bad"][1]["stream"] = False
        if self.embedders:
            body = {"input": [words, "b"], "model": random.choice(self.embedders)}
            found["embedding"] = ("/v1/embeddings", body)
        if self.seeing:
            parts = [{"type": "image_url", "image_url": {"url": picture()}}, {"type": "text", "text": "what"}]
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 8}
            found["picture"] = ("/v1/chat/completions", {**body, "model": random.choice(self.seeing)})
        return found


def picture() -> str:
    """One of 64 pictures as the URL of its bytes: the service keeps what it computes of each."""
    from PIL import Image

    drawn, held = random.Random(random.randrange(64)), io.BytesIO()
    size = drawn.choice((24, 40, 64)), drawn.choice((24, 40))
    Image.frombytes("RGB", size, drawn.randbytes(size[0] * size[1] * 3)).save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


async def one(client: httpx2.AsyncClient, remote: AsyncClient, service: Service, counts: Counts) -> None:
    """Send a random request; one in six clients vanishes in the middle of a stream."""
    requests = service.requests()
    name = random.choice([*requests, "grpc"])
    if name == "grpc":
        stream = remote.stream(
            "def f(", model=random.choice(service.writers), max_tokens=random.randint(1, 48)
        )
        async for _ in stream:
            if random.random() < 0.02:
                break
        await stream.aclose()
        counts.add("grpc")
        return
    path, body = requests[name]
    if not body.get("stream"):
        counts.add((await client.post(path, json=body)).status_code)
        return
    vanishes = random.random() < 1 / 6
    async with client.stream("POST", path, json=body) as answer:
        async for _ in answer.aiter_bytes():
            if vanishes:
                break
        counts.add("vanished" if vanishes else answer.status_code)


async def load(service: Service, until: float, counts: Counts) -> None:
    """Send requests one after the other, with new connections from time to time."""
    while time.monotonic() < until:
        async with (
            httpx2.AsyncClient(base_url=service.url, timeout=600) as client,
            AsyncClient(service.grpc) as remote,
        ):
            for _ in range(50):
                if time.monotonic() >= until:
                    return
                try:
                    await one(client, remote, service, counts)
                except httpx2.TransportError as error:  # such as a connection that both sides end at once
                    counts.add(type(error).__name__)
                    break
                except CarryallError as error:
                    counts.add(f"grpc {type(error).__name__}")


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


async def soak(service: Service, process: psutil.Process, minutes: float, streams: int) -> Counts:
    """Load the service, and return what was counted."""
    counts, until = Counts(), time.monotonic() + 60 * minutes
    await asyncio.gather(
        sample(process, until, counts), *[load(service, until, counts) for _ in range(streams)]
    )
    return counts


def main(arguments: list[str]) -> int:
    """Run the soak and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--model", default="demo", help="the model, or names of models of the folder")
    parser.add_argument("--models", help="a folder of models to serve")
    parser.add_argument("--embedder", default="", help="names of models of texts")
    parser.add_argument("--seeing", default="", help="names of models that take pictures")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--most-mib", type=float, default=32)
    given = parser.parse_args(arguments)
    served = ["--models", given.models] if given.models else [given.model]
    command = [sys.executable, "-m", "carryall", "serve", *served, "--json"]
    command += ["--http-port", "0", "--grpc-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            ready = json.loads(process.stdout.readline() if process.stdout else "{}")
            names = (given.model, given.embedder, given.seeing)
            kinds = [[name for name in part.split(",") if name] for part in names]
            service = Service(f"http://{ready['http']}", ready["grpc"], *kinds)
            counts = asyncio.run(soak(service, psutil.Process(process.pid), given.minutes, given.streams))
            wrong = faults(counts.samples, given.most_mib) + wrong_answers(counts.statuses)
        finally:
            process.terminate()
    print(json.dumps({"answers": counts.statuses, "faults": wrong}))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
