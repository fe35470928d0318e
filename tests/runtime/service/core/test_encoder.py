"""An encoder beside two language models in one process, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_kit import states, write_encoder
from grpc_serving import INFO, serving
from http_serving import http_serving
from null_llm import null_llm

from carryall.client import AsyncClient
from carryall.errors import RequestError, ServiceUnavailableError, UnsupportedTaskError
from carryall.proto import models_pb2
from carryall.runtime.api.text_encoder import TextEncoder
from carryall.runtime.service.core.encoder import EncoderHandler
from carryall.runtime.service.core.model_entry import ModelLoader
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import ServedModel

TEXTS = ["b", "aé", "a longer text"]


def expected(folder: Path, text: str) -> Any:
    """The mean of the rows of a text, scaled to length 1."""
    mean = states(folder, text).astype(np.float64).mean(0)
    return mean / np.linalg.norm(mean)


@asynccontextmanager
async def three_models(folder: Path) -> AsyncIterator[ModelRepository]:
    """Two language models and an encoder."""
    write_encoder(folder)
    async with null_llm() as first, null_llm() as second:
        yield ModelRepository(
            {
                "one": lambda: ServedModel(first, dataclasses.replace(INFO, model="one")),
                "two": lambda: ServedModel(second, dataclasses.replace(INFO, model="two")),
                "vectors": ModelLoader(lambda: TextEncoder(folder), kind="encoder"),
            }
        )


def test_http_serves_all_three(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with three_models(tmp_path / "m") as models, http_serving(None, models) as served:
            client = served.openai()
            found = await client.embeddings.create(model="vectors", input=TEXTS)
            for text, one in zip(TEXTS, found.data, strict=True):
                np.testing.assert_allclose(one.embedding, expected(tmp_path / "m", text), atol=2e-6)
            counts = TextEncoder(tmp_path / "m").token_counts(TEXTS)
            assert (found.usage.prompt_tokens, found.model) == (sum(counts), "vectors")
            short = await served.post("/v1/embeddings", model="vectors", input="b", normalize=False)
            np.testing.assert_allclose(
                short.json()["data"][0]["embedding"], states(tmp_path / "m", "b").mean(0), atol=2e-6
            )
            for name in ("one", "two"):
                answer = await client.completions.create(model=name, prompt="x", max_tokens=2)
                assert answer.model == name
            ranked = await served.post("/rerank", model="vectors", query="aé", documents=["b", "aé", "zz"])
            (best, *others) = ranked.json()["results"]
            assert best["index"] == 1
            assert best["relevance_score"] == pytest.approx(1, abs=1e-6)
            oracle = expected(tmp_path / "m", "aé") @ expected(tmp_path / "m", "b")
            scores = {one["index"]: one["relevance_score"] for one in others}
            assert scores[0] == pytest.approx(oracle, abs=2e-6)
            scored = await served.post("/score", model="vectors", text_1="aé", text_2="b")
            assert scored.json()["data"][0]["score"] == pytest.approx(oracle, abs=2e-6)
            ollama = await served.post("/api/embed", model="vectors:latest", input="b")
            vector = expected(tmp_path / "m", "b")
            np.testing.assert_allclose(ollama.json()["embeddings"][0], vector, atol=2e-6)
            listed = await client.models.list()
            assert [one.id for one in listed.data] == ["one", "two", "vectors"]

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", {"prompt": "x"}, 501, "'vectors' is an encoder"),
        ("/v1/embeddings", {"input": [[5, 999]]}, 400, "token id 999 is out of range"),
        ("/v1/embeddings", {"input": "x", "pooling": "last"}, 400, "has its own pooling"),
        ("/rerank", {"query": "x", "documents": ["y"], "instruction": "find"}, 400, "takes no 'instruction'"),
        ("/score", {"text": "x", "continuations": ["y"]}, 501, "'vectors' is an encoder"),
        ("/v2/models/vectors/infer", {"inputs": []}, 400, "the input 'text_input' is missing"),
    ],
)
def test_an_encoder_refuses_generation(
    path: str, body: dict[str, Any], status: int, message: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with three_models(tmp_path / "m") as models, http_serving(None, models) as served:
            given = body if path.startswith("/v2") else {**body, "model": "vectors"}
            answer = await served.client.post(path, json=given)
            assert (answer.status_code, message in answer.text) == (status, True), answer.text

    asyncio.run(scenario())


def test_grpc_serves_it_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with three_models(tmp_path / "m") as models:
            await models.load_all()
            async with (
                null_llm() as unused,
                serving(unused, models) as served,
                AsyncClient(served.address, attempts=1) as client,
            ):
                vectors = await client.embed(TEXTS, model="vectors")
                for text, vector in zip(TEXTS, vectors, strict=True):
                    np.testing.assert_allclose(vector, expected(tmp_path / "m", text), atol=2e-6)
                ranked = await client.rerank("aé", ["b", "aé"], model="vectors")
                assert ranked[0].index == 1
                kinds = {one.name: one.kind for one in await client.models()}
                assert kinds["vectors"] == models_pb2.MODEL_KIND_ENCODER
                with pytest.raises(UnsupportedTaskError, match="is an encoder"):
                    await client.generate("x", model="vectors")

    asyncio.run(scenario())


@dataclasses.dataclass
class Word:
    """The tokens of a text: its characters."""

    ids: str


class Slow:
    """An encoder that waits before each run, and fails on one text."""

    def __init__(self) -> None:
        self.runs: list[list[str]] = []
        self.go = threading.Event()

    def embed(self, words: list[Word], **options: Any) -> Any:
        texts = [word.ids for word in words]
        self.go.wait(10)
        self.runs.append(texts)
        if "bad" in texts:
            raise RequestError("a text is bad")
        return np.array([[float(ord(text[0])), 0] for text in texts], np.float32)

    def encode(self, texts: list[str], **options: Any) -> list[Any]:
        return [Word(text) for text in texts]


def test_requests_that_wait_share_a_run_and_faults_stay_alone() -> None:
    async def scenario() -> None:
        slow: Any = Slow()
        handler = EncoderHandler("slow", slow)
        first = asyncio.create_task(handler.embed(["a"], normalize=False))
        await asyncio.sleep(0)
        rest = [asyncio.create_task(handler.embed([text], normalize=False)) for text in ("b", "bad", "c")]
        left = asyncio.create_task(handler.embed(["d"]))
        await asyncio.sleep(0)
        left.cancel()
        slow.go.set()
        assert (await first).vectors.tolist() == [[97, 0]]
        found = await asyncio.gather(*rest, return_exceptions=True)
        assert isinstance(found[1], RequestError)
        assert [one.vectors.tolist() for one in (found[0], found[2])] == [[[98, 0]], [[99, 0]]]  # type: ignore[union-attr]
        assert slow.runs[:2] == [["a"], ["b", "bad", "c"]]
        assert sorted(map(tuple, slow.runs[2:])) == [("b",), ("bad",), ("c",)]
        assert handler.active == 0
        slow.go.clear()
        late = asyncio.create_task(handler.embed(["e"]))
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(handler.embed(["f"]))
        await asyncio.sleep(0.01)
        draining = asyncio.create_task(handler.drain(0.05))
        await asyncio.sleep(0.01)
        with pytest.raises(ServiceUnavailableError, match="shutting down"):
            await handler.embed(["g"])
        assert not await draining
        slow.go.set()
        with pytest.raises(ServiceUnavailableError):
            await waiting
        assert (await late).vectors.shape == (1, 2)
        assert await handler.drain(1)

    asyncio.run(scenario())
