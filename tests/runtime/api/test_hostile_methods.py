"""Arguments of wrong types in every method of LLM: an error of carryall, and the model goes on."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from llm_kit import toy_model

from carryall import LLM, SamplingParams
from carryall.errors import CarryallError

P = SamplingParams(max_tokens=1, temperature=0)
USER = [{"role": "user", "content": "x"}]
VALUES: tuple[Any, ...] = (
    *(None, 5, -1, 1.5, float("nan"), True, 2**70, b"x", "", "\ud800", object(), {"a": 1}, np.zeros((2, 2))),
    *([], [None], [5], [[5]], [b"x"], [-1], [2**70], ["x", None], ["\ud800"], (one for one in [None])),
)
CALLS: dict[str, Callable[[LLM, Any], object]] = {
    "generate": lambda llm, value: llm.generate(value, P),
    "generate params": lambda llm, value: llm.generate("x", value),
    "generate lora": lambda llm, value: llm.generate("x", P, lora=value),
    "chat": lambda llm, value: llm.chat(value, P),
    "chat content": lambda llm, value: llm.chat([{"role": "user", "content": value}], P),
    "chat role": lambda llm, value: llm.chat([{"role": value, "content": "x"}], P),
    "chat second": lambda llm, value: llm.chat([USER, value], P),
    "chat params": lambda llm, value: llm.chat(USER, value),
    "chat tools": lambda llm, value: llm.chat(USER, P, tools=value),
    "chat template": lambda llm, value: llm.chat(USER, P, chat_template=value),
    "chat style": lambda llm, value: llm.chat(USER, P, tool_style=value),
    "render_chat": lambda llm, value: llm.render_chat(value),
    "render_chat tools": lambda llm, value: llm.render_chat(USER, tools=value),
    "render_chat template": lambda llm, value: llm.render_chat(USER, chat_template=value),
    "stream": lambda llm, value: list(llm.stream(value, P)),
    "stream params": lambda llm, value: next(llm.stream("x", value)),
    "stream lora": lambda llm, value: next(llm.stream("x", P, lora=value)),
    "transcribe": lambda llm, value: llm.transcribe(value),
    "transcribe language": lambda llm, value: llm.transcribe(np.zeros(9, np.float32), language=value),
    "transcribe_several": lambda llm, value: llm.transcribe_several(value),
    "beam_search": lambda llm, value: llm.beam_search(value),
    "beam_search options": lambda llm, value: llm.beam_search("x", value),
    "score": lambda llm, value: llm.score(value, "x"),
    "score continuations": lambda llm, value: llm.score("x", value),
    "score_chat": lambda llm, value: llm.score_chat(value, ["x"]),
    "score_chat continuations": lambda llm, value: llm.score_chat(USER, value),
    "infill_tokens": lambda llm, value: llm.infill_tokens(value),
    "rerank": lambda llm, value: llm.rerank(value, ["x"]),
    "rerank documents": lambda llm, value: llm.rerank("x", value),
    "rerank instruction": lambda llm, value: llm.rerank("x", ["y"], instruction=value),
    "rerank answers": lambda llm, value: llm.rerank("x", ["y"], answers=value),
    "embed": lambda llm, value: llm.embed(value),
    "embed pooling": lambda llm, value: llm.embed("x", pooling=value),
    "encode": lambda llm, value: llm.encode(value),
    "decode": lambda llm, value: llm.decode(value),
    "load_lora": lambda llm, value: llm.load_lora(value, "nowhere"),
    "load_lora folder": lambda llm, value: llm.load_lora("name", value),
    "unload_lora": lambda llm, value: llm.unload_lora(value),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(toy_model(tmp_path_factory.mktemp("toy"))) as llm:
        yield llm


@pytest.mark.parametrize("call", CALLS)
def test_wrong_arguments_are_errors_of_carryall(call: str, llm: LLM) -> None:
    expected = llm.generate("x", P)[0].outputs[0].token_ids
    for value in VALUES:
        with contextlib.suppress(CarryallError):
            CALLS[call](llm, value)
    assert llm.generate("x", P)[0].outputs[0].token_ids == expected


def test_every_method_has_a_row() -> None:
    methods = {name for name, one in inspect.getmembers(LLM, inspect.isfunction) if not name.startswith("_")}
    assert methods - {call.split()[0] for call in CALLS} == {"close", "stats", "clear_prefix_cache"}
