"""A decode service and a prefill server over real HTTP, with keys, and what neither may accept."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from api_keys import key_file
from http_serving import http_serving
from null_llm import null_model

from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.engine.engine import EngineConfig
from carryall.runtime.engine.requests.prefill_client import PREFILL_KEY_VARIABLE, PREFILL_PATH
from carryall.runtime.service.http.prefill import PrefillService
from carryall.runtime.types.sampling_params import SamplingParams

pytest.importorskip("fsspec")

PROMPT = [7 * n % 250 for n in range(300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SECONDS = 20.0  # instead of what the null provider would need


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_KV_KEY", "a key of 16 or more characters")


def open_llm(folder: Path, server: str | None = None, identity: str = "toy") -> AsyncLLM:
    model = null_model()
    model.identity = identity
    config = EngineConfig(prefix_cache_url=f"file://{folder}/kv", prefill_server=server)
    return AsyncLLM(model, engine_config=config)


@asynccontextmanager
async def prefilling(folder: Path, identity: str = "toy", **config: Any) -> AsyncIterator[Any]:
    llm = open_llm(folder, identity=identity)
    try:
        async with http_serving(llm, parts=[lambda models, settings: PrefillService()], **config) as served:
            yield served
    finally:
        await asyncio.to_thread(llm.shutdown)


async def decoded(folder: Path, server: str | None) -> tuple[list[int], dict[str, int], int | None]:
    """Return the tokens of an answer, how its prompt was computed, and how much of it was cached."""
    llm = open_llm(folder, server)
    llm.engine._prefills._local_seconds = lambda tokens: SECONDS
    try:
        outputs = [output async for output in llm.generate(PROMPT, GREEDY)]
        stats = llm.stats()
        kinds = "remote", "late", "failed", "foreign"
        counts = {kind: count for kind in kinds if (count := getattr(stats, f"prefills_{kind}"))}
        metrics = outputs[-1].metrics
        return outputs[-1].outputs[0].token_ids, counts, metrics.cached_tokens if metrics else None
    finally:
        await asyncio.to_thread(llm.shutdown)


def test_the_decode_service_finds_what_the_prefill_server_computed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with prefilling(tmp_path / "shared") as served:
            found = await decoded(tmp_path / "shared", served.url)
        assert found[1:] == ({"remote": 1}, 256)
        assert found[0] == (await decoded(tmp_path / "alone", None))[0]

    asyncio.run(scenario())


@pytest.mark.parametrize(("sent", "kind"), [("alice-key", "remote"), ("other", "failed"), (None, "failed")])
def test_the_prefill_server_asks_for_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: str | None, kind: str
) -> None:
    monkeypatch.delenv(PREFILL_KEY_VARIABLE, raising=False)
    if sent is not None:
        monkeypatch.setenv(PREFILL_KEY_VARIABLE, sent)

    async def scenario() -> None:
        async with prefilling(tmp_path / "shared", api_keys=key_file(tmp_path, alice="")) as served:
            tokens, counts, _ = await decoded(tmp_path / "shared", served.url)
        assert counts == {kind: 1}
        assert tokens == (await decoded(tmp_path / "alone", None))[0]

    asyncio.run(scenario())


def test_another_model_is_told_apart_and_nothing_of_it_is_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with prefilling(tmp_path, identity="other") as served:
            _, counts, cached = await decoded(tmp_path, served.url)
        assert (counts, cached) == ({"foreign": 1}, 0)

    asyncio.run(scenario())


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with prefilling(tmp_path) as served:
            identity = (await served.models.version(served.models.find(None))).language_model(None)
            good: dict[str, Any] = {
                "prompt": [1, 2],
                "timeout": 5,
                "identity": identity.llm.engine.kv_identity,
            }
            for wrong, status in (
                ({"prompt": "text"}, 400),
                ({"prompt": []}, 400),
                ({"prompt": [-1]}, 400),
                ({"prompt": [1] * 9000}, 400),
                ({"timeout": 0}, 400),
                ({"timeout": "5"}, 400),
                ({"timeout": 1e9}, 400),
                ({"cache_salt": 5}, 400),
                ({"identity": None}, 409),
                ({}, 200),
            ):
                answer = await served.post(PREFILL_PATH, **{**good, **wrong})
                assert answer.status_code == status, (wrong, answer.text)

    asyncio.run(scenario())


class _Silent(http.server.BaseHTTPRequestHandler):
    """Answers with what the test says."""

    reply = b""

    def do_POST(self) -> None:
        self.wfile.write(self.reply)

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def stranger() -> Iterator[http.server.HTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.long
@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 500 no\r\n\r\n<html>",
        b"HTTP/1.1 200 ok\r\nContent-Length: 9\r\n\r\n{",
    ],
)
def test_a_server_that_speaks_otherwise_is_a_failure(
    tmp_path: Path, stranger: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch, reply: bytes
) -> None:
    monkeypatch.setattr(_Silent, "reply", reply)
    url = f"http://127.0.0.1:{stranger.server_port}"
    assert asyncio.run(decoded(tmp_path, url))[1] == {"failed": 1}


def test_a_server_that_is_away_is_a_failure(tmp_path: Path) -> None:
    assert asyncio.run(decoded(tmp_path, "http://127.0.0.1:9"))[1] == {"failed": 1}


@contextmanager
def serving(folder: Path, token_seconds: float, *options: str) -> Iterator[dict[str, str]]:
    """Start ``carryall serve`` with a model that sleeps for each token; yield its addresses."""
    command = [sys.executable, "-m", "carryall", "serve", "demo", "--json", "--provider", "null"]
    command += ["--provider-option", f"token_seconds={token_seconds}", "--http-port", "0", "--grpc-port", "0"]
    environment = {**os.environ, "CARRYALL_CACHE": str(folder)}
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("store", ["a folder", "gRPC"])
def test_two_services_share_the_work_and_answer_as_one(tmp_path: Path, store: str) -> None:
    url = f"file://{tmp_path}/kv" if store == "a folder" else "serve://1GB"
    body = {
        "model": "demo",
        "prompt": "def add(a, b):\n    return a + b\n" * 60,
        "max_tokens": 8,
        "temperature": 0,
    }

    def ask(address: str) -> tuple[str, int]:
        answer = httpx2.post(f"http://{address}/v1/completions", json=body, timeout=120).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def counts(address: str) -> dict[str, float]:
        lines = httpx2.get(f"http://{address}/metrics").text.splitlines()
        found = [
            line.removeprefix("carryall:prefills_") for line in lines if line.startswith("carryall:prefills_")
        ]
        return {line.partition("_total")[0]: value for line in found if (value := float(line.split()[-1]))}

    with serving(tmp_path / "alone", 0.003) as alone:
        expected, cached = ask(alone["http"])
    assert cached == 0
    with ExitStack() as stack:
        prefill = stack.enter_context(
            serving(tmp_path / "prefill", 0.0, "--role", "prefill", "--prefix-cache-url", url)
        )
        if store == "gRPC":
            url = f"grpc://{prefill['grpc']}"
        options = (
            "--role",
            "decode",
            "--prefill-server",
            f"http://{prefill['http']}",
            "--prefix-cache-url",
            url,
        )
        decode = stack.enter_context(serving(tmp_path / "decode", 0.003, *options))
        text, cached = ask(decode["http"])
        assert (text, counts(decode["http"])) == (expected, {"remote": 1.0})
        assert cached >= 256
