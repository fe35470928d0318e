"""Gaps in texts, over llama.cpp's endpoint, OpenAI's ``suffix`` and Ollama's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from http_serving import HttpServed, http_serving
from null_llm import null_llm
from text_kit import byte_level_with
from tokenizers import AddedToken

from carryall.providers.base import RunnerConfig
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.engine.adapters import AdapterSet
from carryall.runtime.models.loading import LoadedModel
from carryall.runtime.text.chat_template import ChatTemplate

MARKS = [AddedToken(f"<|fim_{name}|>", special=True) for name in ("prefix", "suffix", "middle")]
GREEDY = {"temperature": 0}


@asynccontextmanager
async def coder(folder: Path) -> AsyncIterator[tuple[AsyncLLM, HttpServed]]:
    """A service of a model that fills gaps."""
    tokenizer = byte_level_with(folder, MARKS)
    runner = NullRunner(RunnerConfig(context_length=256), NullOptions(vocab_size=tokenizer.vocab_size))
    model = LoadedModel("toy", runner, tokenizer, ChatTemplate({}, {}))
    model.adapters = AdapterSet(runner.info)
    llm = AsyncLLM(model)
    try:
        async with http_serving(llm) as served:
            yield llm, served
    finally:
        llm.shutdown()


def test_all_doors_fill_the_same_gap(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coder(tmp_path) as (_, served):
            gap: Any = {"input_prefix": "def f(", "input_suffix": "): pass", "n_predict": 6, **GREEDY}
            whole = (await served.post("/infill", **gap)).json()
            events = await served.events("/infill", **gap, stream=True)
            assert "".join(event["content"] for event in events) == whole["content"]
            assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
            openai: Any = {"prompt": "def f(", "suffix": "): pass", "max_tokens": 6, **GREEDY}
            completion = (await served.post("/v1/completions", **openai)).json()
            options = {"num_predict": 6, **GREEDY}
            ollama: Any = {"prompt": "def f(", "suffix": "): pass", "options": options, "stream": False}
            generated = (await served.post("/api/generate", **ollama)).json()
        assert completion["choices"][0]["text"] == generated["response"] == whole["content"]
        assert (whole["tokens_predicted"], whole["stop_type"]) == (6, "limit")
        assert (
            whole["tokens_evaluated"] == completion["usage"]["prompt_tokens"] == 1 + 3 + len("def f(): pass")
        )

    asyncio.run(scenario())


def test_text_of_the_gap_and_files_are_part_of_the_prompt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coder(tmp_path) as (_, served):
            body: Any = {"input_prefix": "a", "input_suffix": "b", "n_predict": 1, **GREEDY}
            files = [{"filename": "x.py", "text": "X = 1"}]
            more = {**body, "prompt": "cd", "input_extra": files, "cache_prompt": True, "samplers": ["top_k"]}
            counts = [
                (await served.post("/infill", **one)).json()["tokens_evaluated"] for one in (body, more)
            ]
            assert counts[1] - counts[0] == len("cd") + len("x.py\nX = 1\n")

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/infill", {"input_prefix": 5}, "input_prefix"),
        ("/infill", {"input_extra": [5]}, "input_extra"),
        ("/infill", {"input_extra": {"filename": "x"}}, "input_extra"),
        ("/infill", {"n_predict": "x"}, "max_tokens"),
        ("/v1/completions", {"prompt": [1, 2], "suffix": "x"}, "with 'suffix'"),
        ("/v1/completions", {"prompt": "x", "suffix": "x", "echo": True}, "'echo'"),
        ("/v1/completions", {"prompt": "x", "suffix": 5}, "'suffix'"),
    ],
)
def test_wrong_bodies_are_told(tmp_path: Path, path: str, body: dict[str, Any], message: str) -> None:
    async def scenario() -> None:
        async with coder(tmp_path) as (_, served):
            answer = await served.post(path, **body)
            assert (answer.status_code, message in answer.text) == (400, True), answer.text

    asyncio.run(scenario())


def test_a_model_that_fills_no_gaps_says_so_at_each_door() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            for path, body in (
                ("/infill", {"input_prefix": "a"}),
                ("/v1/completions", {"prompt": "a", "suffix": "b"}),
                ("/v1/completions", {"prompt": "a", "suffix": "b", "stream": True}),
                ("/api/generate", {"prompt": "a", "suffix": "b"}),
            ):
                answer = await served.post(path, **body)
                assert (answer.status_code, "fills no gaps" in answer.text) == (400, True), (
                    path,
                    answer.text,
                )
                assert json.loads(answer.text)

    asyncio.run(scenario())
