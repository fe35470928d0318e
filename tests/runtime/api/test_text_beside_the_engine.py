"""Slow text processing of one request delays neither the engine's steps nor other requests.

Each test blocks one kind of text processing and runs a whole other request at the same time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from llm_kit import toy_model

from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.llm import LLM
from carryall.runtime.api.prompts import ChatPrompt, Prompt
from carryall.runtime.models.loading import LoadedModel
from carryall.runtime.text.parsers.base import MessageParser, ParsedMessage
from carryall.runtime.text.parsers.formats import HERMES, AnswerFormat
from carryall.runtime.text.parsers.registry import message_parser
from carryall.runtime.text.stop_strings import StopStrings
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.outputs import RequestOutput
from carryall.runtime.types.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=20)
LONG = "Z" * 5000
TIMEOUT = 30


class BlockingTokenizer:
    """A tokenizer that blocks on texts with a Z, and on its token, until released."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.entered, self.released = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def block(self) -> None:
        self.entered.set()
        assert self.released.wait(TIMEOUT)

    def encode(self, text: str, **options: Any) -> list[int]:
        if "Z" in text:
            self.block()
        return self._tokenizer.encode(text, **options)


class BlockingParser(MessageParser):
    def __init__(self, tokenizer: BlockingTokenizer) -> None:
        super().__init__(ParsedMessage())
        self._tokenizer = tokenizer

    def _advance(self, *, final: bool) -> bool:
        self._tokenizer.block()
        self.message.content.add(self._text)
        self._text = ""
        return False


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    made = toy_model(tmp_path, context_length=8192)
    assert made.tokenizer is not None
    made.tokenizer = BlockingTokenizer(made.tokenizer)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.add_request(LONG, PARAMS),
        lambda llm: llm.add_request("a", SamplingParams(bad_words=[LONG])),  # type: ignore[arg-type]
        lambda llm: llm.score("a", "Z"),
        lambda llm: llm.embed(["Z"]),
        lambda llm: llm.rerank("q", ["Z"]),
        lambda llm: llm.render([{"role": "user", "content": "Z"}]),
    ],
)
def test_a_tokenizer_that_blocks(model: LoadedModel, ask: Callable[[AsyncLLM], Awaitable[Any]]) -> None:
    tokenizer: Any = model.tokenizer

    async def test() -> None:
        llm = AsyncLLM(model)
        blocked = asyncio.ensure_future(ask(llm))
        await asyncio.to_thread(tokenizer.entered.wait, TIMEOUT)
        outputs = [output async for output in llm.generate("free", PARAMS)]
        assert len(outputs[-1].outputs[0].token_ids) == 20
        assert not blocked.done()
        tokenizer.released.set()
        await asyncio.gather(blocked, return_exceptions=True)
        llm.shutdown()

    asyncio.run(asyncio.wait_for(test(), TIMEOUT))


def blocked_and_free(llm: LLM, prompt: Prompt, tokenizer: Any) -> tuple[RequestOutput, RequestOutput]:
    found: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: found.extend(llm.generate([prompt], PARAMS)))
    thread.start()
    assert tokenizer.entered.wait(TIMEOUT)
    (free,) = llm.generate("free", PARAMS)
    assert not found
    tokenizer.released.set()
    thread.join(TIMEOUT)
    return found[0], free


def test_a_tokenizer_that_blocks_in_a_thread_beside_llm(model: LoadedModel) -> None:
    with LLM(model) as llm:
        late, free = blocked_and_free(llm, "Z", model.tokenizer)
    assert [len(one.outputs[0].token_ids) for one in (late, free)] == [20, 20]


def test_a_parser_that_blocks_in_a_thread_beside_llm(model: LoadedModel) -> None:
    tokenizer: Any = model.tokenizer
    with LLM(model) as llm:
        prompt = ChatPrompt([1, 2, 3], lambda: BlockingParser(tokenizer))
        late, free = blocked_and_free(llm, prompt, tokenizer)
    assert [len(one.outputs[0].token_ids) for one in (late, free)] == [20, 20]


@pytest.mark.parametrize(
    ("params", "beside"),
    [
        (SamplingParams(stop=("ab",)), False),
        (SamplingParams(stop=("a" * 5000,)), True),  # its table is computed in Python, 1 us a character
        (SamplingParams(stop=("a" * 100,), n=50), True),
        (SamplingParams(stop=("a" * 100,), best_of=50), True),
    ],
)
def test_long_stop_strings_are_prepared_beside_the_event_loop(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, params: SamplingParams, beside: bool
) -> None:
    threads = set[threading.Thread]()
    prepare = StopStrings.__init__

    def noted(self: StopStrings, *args: Any, **options: Any) -> None:
        threads.add(threading.current_thread())
        prepare(self, *args, **options)

    monkeypatch.setattr(StopStrings, "__init__", noted)

    async def test() -> None:
        llm = AsyncLLM(model)
        (await llm.add_request("a", params)).cancel()
        llm.shutdown()

    asyncio.run(test())
    assert len(threads) == 1
    assert (threads != {threading.main_thread()}) is beside


def test_the_engine_s_thread_neither_decodes_nor_parses_without_stop_strings(model: LoadedModel) -> None:
    threads = set[str]()
    tokenizer: Any = model.tokenizer
    decode = tokenizer._tokenizer.decode

    def noted(tokens: Sequence[int], **options: Any) -> str:
        threads.add(threading.current_thread().name)
        return str(decode(tokens, **options))

    tokenizer.decode = noted

    async def test() -> None:
        llm = AsyncLLM(model)
        wanted = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, prompt_logprobs=1)
        async for output in llm.generate("free", wanted):
            assert output.outputs[0].logprobs is not None
            assert output.prompt_logprobs is not None
        llm.shutdown()

    asyncio.run(test())
    assert threads == {threading.main_thread().name}


class Counted(list[Any]):
    """A list that counts the items copied from it."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        Counted.copied += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Any:
        Counted.copied += len(self)
        return super().__iter__()

    def copy(self) -> Any:
        Counted.copied += len(self)
        return super().copy()


@pytest.mark.long
@pytest.mark.parametrize("stop", [(), ("never this",)])
@pytest.mark.parametrize("parsed", [False, True])
def test_work_for_a_published_token_does_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...], parsed: bool
) -> None:
    """Counts the items read from lists that grow with the output, and the decoded tokens."""
    model = toy_model(tmp_path, context_length=4096)
    params = SamplingParams(temperature=0.0, max_tokens=800, ignore_eos=True, logprobs=1, stop=stop)
    work: list[int] = []
    decoded = 0
    tokenizer: Any = model.tokenizer
    plain = tokenizer.decode

    def decode(tokens: Sequence[int], **options: Any) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return str(plain(tokens, **options))

    tokenizer.decode = decode
    prompt: Prompt = [1, 2, 3]
    if parsed:
        answer = AnswerFormat("test", calls=HERMES)
        prompt = ChatPrompt([1, 2, 3], lambda: message_parser(answer, tools=[{"name": "f"}]))
    with LLM(model) as llm:
        group = llm.requests.group(prompt, params)
        (request,) = group.requests
        request.output_token_ids, request.output_logprobs = Counted(), Counted()
        for name in ("_tokens", "_pieces"):
            monkeypatch.setattr(request.text, name, Counted(getattr(request.text, name)))
        llm._add([group])
        Counted.copied = 0
        while not group.finished:
            before = Counted.copied + decoded
            seen = group.num_generated
            llm._step_for(group, seen)
            group.read()
            work.append(Counted.copied + decoded - before)
    assert len(work) >= 800
    early, late = work[10:110], work[-101:-1]
    assert sum(late) <= 1.5 * sum(early)
    assert max(late) < 150
