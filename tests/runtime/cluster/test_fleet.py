"""Eight replicas under load through the real client, one of which is killed; an update while requests run."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import openai
import psutil
import pytest

from carryall.exporter.demo import demo_path
from carryall.exporter.export import export_package

SECONDS = 300.0
RULES = "You complete functions of a library. " * 13  # 481 characters: the questions end within 512


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster of one node that claims to have ten processors."""
    pytest.importorskip("ray.serve")
    from ray.cluster_utils import Cluster

    for name, value in (
        ("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0"),
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("RAY_worker_niceness", "0"),
        ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60"),
        ("RAY_SERVE_PROXY_USE_GRPC", "1"),
    ):
        monkeypatch.setenv(name, value)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 10, "include_dashboard": False})
    try:
        yield made.address
    finally:
        made.shutdown()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The demo, as a package."""
    export_package(demo_path("pycoder"), tmp_path / "toy")
    return tmp_path / "toy"


@contextmanager
def serving(address: str, model: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A command that serves a model on a cluster, once it is ready."""
    command = [sys.executable, "-m", "carryall", "serve", str(model), "--ray", "auto", "--json", *options]
    environment = {**os.environ, "RAY_ADDRESS": address}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("{")), "")
        assert line, "the command ended before it served"
        assert json.loads(line)["http"].endswith(":8000")
        try:
            yield process
        except BaseException:
            process.kill()  # Popen's own context would wait for it
            raise
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0


def replicas() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [""])[0].startswith("ray::ServeReplica:carryall:replica"):
            found.append(process)
    return found


def client() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=0, timeout=SECONDS
    )


async def streamed(ask: openai.AsyncOpenAI, prompt: str, tokens: int) -> str:
    """Read a stream; return "whole", or how it ended."""
    count, ends = 0, ""
    try:
        async for chunk in await ask.completions.create(
            model="toy", prompt=prompt, max_tokens=tokens, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        ):  # fmt: skip
            count += bool(chunk.choices and chunk.choices[0].text)
            ends = (chunk.choices and chunk.choices[0].finish_reason) or ends
    except openai.APIError as error:
        return f"error: {error}"
    return "whole" if ends == "length" else f"cut after {count}"


async def cached(ask: openai.AsyncOpenAI, prompt: str) -> tuple[int, int]:
    """Return how many tokens of a prompt were in the replica's cache, and how many it has."""
    answer = await ask.completions.create(model="toy", prompt=prompt, max_tokens=1, temperature=0)
    assert answer.usage
    details = answer.usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details else 0, answer.usage.prompt_tokens


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_eight_replicas_serve_a_load_and_lose_one_in_mid_stream(cluster: str, model: Path) -> None:
    async def scenario() -> None:
        async with client() as ask:
            assert len(replicas()) == 8
            # Prompts with common rules, but with other questions, go where the rules are.
            _, length = await cached(ask, RULES)
            hits = [await cached(ask, f"{RULES}\ndef function_{n}(x):") for n in range(16)]
            share = sum(found for found, _ in hits) / sum(whole for _, whole in hits)
            print(f"{length} tokens of rules; found in the cache {share:.2f} of the tokens of 16 prompts")
            assert share > 0.8

            begun = time.monotonic()
            texts = [f"# {random.Random(n).random()}\ndef f{n}(x):" for n in range(64)]
            streams = [asyncio.create_task(streamed(ask, text, 200)) for text in texts]
            await asyncio.sleep(2)
            random.Random(0).choice(replicas()).kill()
            ends = [await stream for stream in streams]
            seconds = time.monotonic() - begun
            whole = ends.count("whole")
            print(f"64 streams of 200 tokens, one replica killed: {whole} whole, {seconds:.1f} s")
            assert all(end == "whole" or "the replica that answered was lost" in end for end in ends), ends
            assert 0 < 64 - whole <= 24, ends
            assert await streamed(ask, "def afterwards():", 20) == "whole"

    with serving(cluster, model, "--replicas", "8", "--num-threads", "1", "--max-slots", "16"):
        asyncio.run(scenario())
    assert replicas() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_flood_on_one_prefix_is_shared_by_the_replicas(cluster: str, model: Path) -> None:
    async def scenario() -> None:
        async with client() as ask:
            _, rules = await cached(ask, RULES)
            before = {process.pid: sum(process.cpu_times()[:2]) for process in replicas()}
            prompts = [f"{RULES}\ndef function_{n}(x):" for n in range(64)]

            async def answered(prompt: str) -> int:
                answer = await ask.completions.create(
                    model="toy", prompt=prompt, max_tokens=100, temperature=0, extra_body={"ignore_eos": True}
                )
                assert answer.choices[0].finish_reason == "length"
                assert answer.usage
                details = answer.usage.prompt_tokens_details
                return (details.cached_tokens or 0) if details else 0

            hits = await asyncio.gather(*map(answered, prompts))
            used = [sum(process.cpu_times()[:2]) - before[process.pid] for process in replicas()]
            shares = [each / sum(used) for each in used]
            found = sum(hit > 0.9 * rules for hit in hits)
            print(f"{found} of 64 prompts found the rules; shares of the work", [f"{s:.2f}" for s in shares])
            assert max(shares) < 0.3
            assert sum(share > 0.03 for share in shares) >= 6  # 8 / 1.5: then no replica has too many
            assert found >= 64 - 24  # replicas that compute the rules for several at once

    with serving(cluster, model, "--replicas", "8", "--num-threads", "1", "--max-slots", "16"):
        asyncio.run(scenario())
    assert replicas() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_an_update_fails_no_request(cluster: str, model: Path) -> None:
    async def scenario(old: subprocess.Popen[str]) -> None:
        async with client() as ask:
            before = {process.pid for process in replicas()}
            ends: list[str] = []
            over = asyncio.Event()

            async def user(number: int) -> None:
                while not over.is_set():
                    ends.append(await streamed(ask, f"# {len(ends)}\ndef f{number}(x):", 100))

            users = [asyncio.create_task(user(number)) for number in range(6)]
            await asyncio.sleep(2)
            options = ("--replicas", "2", "--num-threads", "1", "--max-slots", "8")
            new = await asyncio.to_thread(stack.enter_context, serving(cluster, model, *options))
            old.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(old.wait, SECONDS) == 0
            async with asyncio.timeout(SECONDS):
                while before & {process.pid for process in replicas()}:
                    await asyncio.sleep(1)
            count = len(ends)
            while len(ends) < count + 12:  # the new ones answer
                await asyncio.sleep(0.5)
            over.set()
            await asyncio.gather(*users)
            print(f"{len(ends)} streams while 2 replicas were replaced")
            assert set(ends) == {"whole"}, [end for end in ends if end != "whole"]
            assert len(replicas()) == 2
            assert new.poll() is None

    with ExitStack() as stack:
        few = ("--replicas", "2", "--num-threads", "1", "--max-slots", "4")
        asyncio.run(scenario(stack.enter_context(serving(cluster, model, *few))))
    assert replicas() == []
