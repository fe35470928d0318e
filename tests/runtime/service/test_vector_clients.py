"""Clients of vectors, ranks and classes that others wrote; docs/clients.md is the report."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from http_serving import http_serving
from own_environment import python_with
from sentence_models import write_classifier, write_sentence_model
from tiny_encoders import CLASSIFIER, write_tiny_encoder

from carryall.runtime.api.load_encoder import load_encoder
from carryall.runtime.service.core.model_entry import ModelLoader
from carryall.runtime.service.core.repository import ModelRepository

CLIENTS = Path(__file__).resolve().parents[2] / "kits/service/clients"
PACKAGES = {
    "huggingface_vectors.py": ("huggingface_hub", "numpy"),
    "cohere_client.py": ("cohere",),
    "qdrant_vectors.py": ("qdrant-client", "openai"),
    "chroma_vectors.py": ("chromadb", "openai", "httpx"),
    "langchain_vectors.py": ("langchain-openai", "langchain-huggingface"),
    "haystack_vectors.py": ("haystack-ai", "huggingface-api-haystack"),
    "llama_index_vectors.py": (
        "llama-index-embeddings-openai-like",
        "llama-index-embeddings-text-embeddings-inference",
        "llama-index-postprocessor-tei-rerank",
    ),
}
SECONDS = 300

pytestmark = pytest.mark.slow


@asynccontextmanager
async def services(folder: Path) -> AsyncIterator[dict[str, str]]:
    """The URLs of services: of all models by name, and of each alone."""
    folders = {
        name: write_sentence_model(folder / name, kind)
        for name, kind in (("dense", "cls"), ("splade", "splade"), ("colbert", "colbert"))
    }
    folders |= {name: write_classifier(folder / name, name) for name in ("names", "inference")}
    labels: dict[str, Any] = {"id2label": {"0": "LABEL_0"}}
    folders["ranker"] = write_tiny_encoder(folder / "ranker", "bert", CLASSIFIER, **labels)

    def loader(path: Path) -> ModelLoader:
        return ModelLoader(lambda: load_encoder(path, "cpu", {}, warm_up=True), kind="encoder")

    loaders = {name: loader(path) for name, path in folders.items()}
    async with AsyncExitStack() as stack:
        urls = {}
        for name, wanted in (("all", loaders), *((name, {name: one}) for name, one in loaders.items())):
            served = await stack.enter_async_context(http_serving(None, ModelRepository(wanted)))
            urls[name] = served.url
        yield urls


@pytest.mark.parametrize("script", PACKAGES)
def test_client(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = python_with(*PACKAGES[script])
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))

    async def scenario() -> None:
        async with services(tmp_path) as urls:
            process = await asyncio.create_subprocess_exec(
                *(python, CLIENTS / script, json.dumps(urls)),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(CLIENTS)},
            )
            out, err = await asyncio.wait_for(process.communicate(), SECONDS)
            assert process.returncode == 0, f"{out.decode()[-9000:]}\n{err.decode()[-3000:]}"
            results = json.loads(out.decode().splitlines()[-1])
            assert len(results) > 1
            assert {name: error for name, error in results.items() if error} == {}

    asyncio.run(scenario())
