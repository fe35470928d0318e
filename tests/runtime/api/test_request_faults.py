"""A fault in the text processing of one request fails only that request, not the engine or other requests."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from llm_kit import toy_model

from carryall.errors import CarryallWarning, RequestFailedError
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.llm import LLM
from carryall.runtime.api.requests import ChatPrompt, Prompt, RequestFactory
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.engine.sampling.sampling_state import SamplingState
from carryall.runtime.models.loading import LoadedModel
from carryall.runtime.text.parsers.base import MessageParser, ParsedMessage
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.outputs import RequestOutput
from carryall.runtime.types.sampling_params import SamplingParams

GOOD = SamplingParams(temperature=0.0, max_tokens=12)
CANARY = "canary-Z"
Z = ord("Z") - 33  # its token


class FaultyTokenizer:
    """A tokenizer that fails on texts with a Z, and on tokens after it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.broken: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        if self.broken == "encode" and "Z" in text:
            raise ValueError(CANARY)
        return self._tokenizer.encode(text, **options)

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        if self.broken == "decode" and Z in tokens and tokens[-1] != Z:
            raise ValueError(CANARY)
        return self._tokenizer.decode(tokens, **options)


class FaultyParser(MessageParser):
    def _advance(self, *, final: bool) -> bool:
        raise ValueError(CANARY)


class FaultyGrammar:
    """A grammar that allows every token and fails in one chosen method."""

    lowers = True

    def __init__(self, broken: str) -> None:
        self.broken = broken

    def _maybe(self, name: str) -> None:
        if name == self.broken:
            raise ValueError(CANARY)

    def prepare(self) -> None:
        self._maybe("prepare")

    def ready(self, seconds: float) -> bool:
        self._maybe("ready")
        return True

    def observe(self, token: int) -> None:
        self._maybe("observe")

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        self._maybe("apply")

    @property
    def finished(self) -> bool:
        self._maybe("finished")
        return False

    @property
    def error(self) -> str:
        self._maybe("error")
        return ""

    def copy(self) -> FaultyGrammar:
        self._maybe("copy")
        return self

    def forced_tokens(self) -> list[int]:
        self._maybe("forced_tokens")
        return [1, 2] if self.broken == "valid_prefix" else []

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        self._maybe("valid_prefix")
        return len(tokens)


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    made = toy_model(tmp_path)
    assert made.tokenizer is not None
    made.tokenizer = FaultyTokenizer(made.tokenizer)  # type: ignore[assignment]
    return made


def last(outputs: list[RequestOutput]) -> RequestOutput:
    return outputs[-1]


Run = Callable[[LoadedModel, Prompt, SamplingParams], tuple[RequestOutput, RequestOutput]]


def by_llm(model: LoadedModel, prompt: Prompt, params: SamplingParams) -> tuple[RequestOutput, RequestOutput]:
    with LLM(model) as llm:
        with warnings.catch_warnings(record=True, action="always") as told:
            good, bad = llm.generate(["good", prompt], [GOOD, params])
        assert [each.category for each in told] == [CarryallWarning] * (bad.error is not None)
        assert not llm.engine.has_work
        llm.engine.check_integrity()
        assert llm.generate("good", GOOD)[0].outputs[0].token_ids == good.outputs[0].token_ids
        return good, bad


def by_stream(
    model: LoadedModel, prompt: Prompt, params: SamplingParams
) -> tuple[RequestOutput, RequestOutput]:
    with LLM(model) as llm:
        streams = [llm.stream("good", GOOD), llm.stream(prompt, params)]
        good, bad = (last(list(stream)) for stream in streams)
        assert not llm.engine.has_work
        return good, bad


def by_async(
    model: LoadedModel, prompt: Prompt, params: SamplingParams
) -> tuple[RequestOutput, RequestOutput]:
    llm = AsyncLLM(model)

    async def read(prompt: Prompt, params: SamplingParams) -> RequestOutput:
        return last([output async for output in llm.generate(prompt, params)])

    async def both() -> tuple[RequestOutput, RequestOutput]:
        good, bad = await asyncio.gather(read("good", GOOD), read(prompt, params))
        assert (await read("good", GOOD)).outputs[0].token_ids == good.outputs[0].token_ids
        while llm.engine.has_work:  # cancelled requests leave in the next step
            await asyncio.sleep(0.001)
        return good, bad

    try:
        return asyncio.run(asyncio.wait_for(both(), 30))
    finally:
        llm.shutdown()


@pytest.fixture(params=[by_llm, by_stream, by_async])
def run(request: pytest.FixtureRequest) -> Run:
    way: Run = request.param
    return way


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.DEBUG):
        yield lambda: [record.getMessage() for record in caplog.records]


def check(good: RequestOutput, bad: RequestOutput, why: str) -> None:
    assert (good.error, good.outputs[0].finish_reason, len(good.outputs[0].text) > 3) == (
        None,
        "length",
        True,
    )
    assert good.outputs[0].text
    assert bad.finished
    assert bad.error is not None
    assert why in bad.error
    assert [one.finish_reason for one in bad.outputs] == ["error"]


@pytest.mark.parametrize("stop", [(), ("never this",)])
def test_the_detokenizer(model: LoadedModel, run: Run, records: Any, stop: tuple[str, ...]) -> None:
    model.tokenizer.broken = "decode"  # type: ignore[union-attr]
    good, bad = run(model, "Z", SamplingParams(temperature=0.0, max_tokens=12, stop=stop))
    check(good, bad, "failed: ValueError")
    logged = " ".join(records())
    assert "ValueError" in logged
    assert "decode" in logged
    assert CANARY not in logged


def test_a_parser(model: LoadedModel, run: Run, records: Any) -> None:
    good, bad = run(model, ChatPrompt([1, 2, 3], lambda: FaultyParser(ParsedMessage())), GOOD)
    check(good, bad, "making the text failed: ValueError")
    assert "_advance" in " ".join(records())
    assert CANARY not in " ".join(records())


def test_the_tokenizer(model: LoadedModel, run: Run) -> None:
    model.tokenizer.broken = "encode"  # type: ignore[union-attr]
    with pytest.raises(RequestFailedError, match="the tokenizer failed: ValueError"):
        run(model, "Z", GOOD)


def raises(tokens: list[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    raise KeyError("mine")


def all_nan(tokens: list[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.full_like(logits, np.nan)


def wrong_shape(tokens: list[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return logits[:-1]


def no_array(tokens: list[int], logits: npt.NDArray[np.float32]) -> Any:
    return "text"


def nothing(tokens: list[int], logits: npt.NDArray[np.float32]) -> Any:
    return None


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (raises, "KeyError('mine')"),
        (all_nan, "not finite numbers"),
        (wrong_shape, "it returned shape (257,) for logits (258,)"),
        (no_array, "failed: ValueError"),
        (nothing, "failed: "),
    ],
)
def test_a_request_s_own_logits_processor(model: LoadedModel, run: Run, function: Any, why: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, logits_processors=(function,))
    check(*run(model, [1, 2, 3], params), why)


class FaultyBatchProcessor:
    """A batch processor that fails for some requests, in the method that they name."""

    def wants(self, params: SamplingParams) -> bool:
        if params.extra_args.get("broken") == "wants":
            raise KeyError("mine")
        return True

    def apply(self, logits: npt.NDArray[np.float32], states: Sequence[SamplingState]) -> None:
        for row, state in zip(logits, states, strict=True):
            match state.params.extra_args.get("broken"):
                case "apply":
                    raise KeyError("mine")
                case "nan":
                    row[3] = np.nan


@pytest.mark.parametrize(
    ("broken", "why"), [("wants", "KeyError('mine')"), ("apply", "KeyError('mine')"), ("nan", "not finite")]
)
def test_a_batch_logits_processor(model: LoadedModel, broken: str, why: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, extra_args={"broken": broken})
    config = EngineConfig(logits_processors=(FaultyBatchProcessor(),))
    warned = pytest.warns(CarryallWarning, match="the request of prompt 1 failed")
    with LLM(model, engine_config=config) as llm, warned:
        good, bad = llm.generate(["good", "bad"], [GOOD, params])
    check(good, bad, why)


@pytest.mark.parametrize(
    "broken",
    ["copy", "prepare", "ready", "apply", "observe", "finished", "forced_tokens", "valid_prefix"],
)
def test_a_grammar(model: LoadedModel, run: Run, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(_: RequestFactory, params: SamplingParams, frame: object) -> Future[FaultyGrammar] | None:
        if params.structured_output is None:
            return None
        future = Future[FaultyGrammar]()
        future.set_result(FaultyGrammar(broken))
        return future

    monkeypatch.setattr(RequestFactory, "_grammar", compiled)
    params = SamplingParams(temperature=0.0, max_tokens=12, structured_output={"regex": "x"})  # type: ignore[arg-type]
    if broken == "copy":  # rejected before it runs
        with pytest.raises(Exception, match="could not be compiled: ValueError"):
            run(model, [1, 2, 3], params)
        return
    check(*run(model, [1, 2, 3], params), "failed: ValueError")


def test_a_command_that_raises_when_the_engine_has_ended_leaves_no_reader_hanging(model: LoadedModel) -> None:
    async def test() -> None:
        llm = AsyncLLM(model)
        slow = SamplingParams(temperature=0.0, max_tokens=200)
        stream = await llm.add_request("good", slow)

        def broken() -> None:
            raise ZeroDivisionError("a bug in a command")

        release = asyncio.Event()
        thread = llm._thread
        with thread._wake:  # the thread waits for this lock, so none of these is processed
            thread._inbox += [broken]
            thread.closed = "the engine was shut down"
            thread._wake.notify()
        release.set()
        with pytest.raises(Exception, match="was shut down"):
            async for _ in stream:
                pass
        llm.shutdown()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_fault_while_queueing_fails_that_request_alone(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        llm = AsyncLLM(model)
        add = llm.engine.add

        def faulty(request: Any) -> None:
            if request.request_id == "bad":
                raise ZeroDivisionError("a bug")
            add(request)

        monkeypatch.setattr(llm.engine, "add", faulty)
        with pytest.raises(RequestFailedError, match="queueing the request failed: ZeroDivisionError"):
            async for _ in llm.generate("bad", GOOD, "bad"):
                pass
        assert [output async for output in llm.generate("good", GOOD)][-1].finished
        llm.shutdown()

    asyncio.run(asyncio.wait_for(test(), 30))
