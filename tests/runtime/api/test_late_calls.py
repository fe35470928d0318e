"""With tool_choice auto, calls are held to their schemas from the first marker on; other text is free."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from llm_kit import toy_model

from carryall.errors import InvalidSamplingError
from carryall.runtime.api.llm import LLM
from carryall.runtime.text import grammars
from carryall.runtime.text.chat_template import ChatTemplate
from carryall.runtime.text.grammars import GrammarCompiler, GrammarMatcher, LateMatcher
from carryall.runtime.types.sampling_params import SamplingParams

# A template that writes calls as Hermes does, and the tools' names.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% if not loop.last %}\n{% endif %}{% endfor %}{% endfor %}{% for t in tools or [] %}"
    "{{ t.function.name }}{% endfor %}"
)
FORM = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}, "flag": {"type": "boolean"}},
    "required": ["n"],
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": FORM}} for name in ("add", "sub")]
TURNS = [{"role": "user", "content": "x"}]


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    model = toy_model(tmp_path, context_length=1024, end_token_ids=())
    model.chat_template = ChatTemplate({"default": TEMPLATE}, {})
    with LLM(model) as llm:
        yield llm


def begins_with(
    llm: LLM, text: str
) -> Callable[[list[int], npt.NDArray[np.float32]], npt.NDArray[np.float32]]:
    """A processor by which the answer begins with a text; the model goes on as it likes."""
    tokens = llm.encode(text, add_special_tokens=False)

    def force(generated: list[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if len(generated) < len(tokens):
            logits[:] = -np.inf
            logits[tokens[len(generated)]] = 0.0
        return logits

    return force


def answered(llm: LLM, begin: str, tools: Any = TOOLS, **options: Any) -> Any:
    params = SamplingParams(
        max_tokens=150, temperature=0.8, seed=3, logits_processors=(begins_with(llm, begin),), **options
    )
    (output,) = llm.chat(TURNS, params, tools=tools)
    output.check()
    return output.outputs[0]


def test_a_random_model_calls_by_the_schema_once_it_begins_to(llm: LLM) -> None:
    answer = answered(llm, "some text <tool_call>")
    assert answer.text.startswith("some text")
    call = answer.tool_calls[0]
    assert call.name in ("add", "sub")
    arguments = json.loads(call.arguments)
    assert arguments["n"] in (1, 2)
    assert set(arguments) <= {"n", "flag"}


def test_an_answer_without_a_call_is_what_it_is_without_tools(llm: LLM) -> None:
    free = answered(llm, "text", tools=None)
    held = answered(llm, "text", tools=[])
    assert held.token_ids == free.token_ids
    begin = "text"
    params = SamplingParams(
        max_tokens=80, temperature=0.8, seed=3, logits_processors=(begins_with(llm, begin),)
    )
    prompt = llm.render_chat(TURNS, tools=TOOLS)
    (with_tools,) = llm.generate(prompt, params)
    (same_tokens,) = llm.generate(prompt.token_ids, params)
    assert with_tools.outputs[0].token_ids == same_tokens.outputs[0].token_ids


def test_several_outputs_are_held_each_by_its_own_state(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=150, n=3, temperature=1.0, seed=1, logits_processors=(begins_with(llm, "<tool_call>"),)
    )
    (output,) = llm.chat(TURNS, params, tools=TOOLS)
    for answer in output.outputs:
        assert json.loads(answer.tool_calls[0].arguments)["n"] in (1, 2)


def test_the_tokens_do_not_depend_on_when_the_grammar_is_compiled(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = answered(llm, "<tool_call>")
    plain, opened = GrammarCompiler._compile, threading.Event()

    def slow(self: GrammarCompiler, *args: Any) -> GrammarMatcher:
        opened.wait(0.5)  # the marker is written long before
        return plain(self, *args)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    llm.requests.grammars = None
    assert answered(llm, "<tool_call>").token_ids == quick.token_ids


@pytest.mark.parametrize("parameters", [{"$ref": "#/missing"}, 5, {"type": "wrong"}])
def test_tools_that_no_grammar_can_hold_leave_the_answer_free(llm: LLM, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    assert len(answered(llm, "<tool_call>", tools=tools).token_ids) == 150


def test_without_a_name_the_answer_is_free(llm: LLM) -> None:
    prompt = llm.render_chat(TURNS, tools=[{"type": "function", "function": {"name": "add"}}])
    assert prompt.frame is not None
    late = LateMatcher(Future(), "<tool_call>", str)
    late._compiled.set_exception(KeyError("name"))
    late.observe(1)
    assert late.ready(0)
    late._text = "<tool_call"
    late._text_of = lambda token: ">"
    late.observe(2)
    assert late.begun
    assert late.ready(0)
    assert late.valid_prefix([1, 2]) == 2
    assert not late.error
    assert not late.finished


def test_no_mask_is_computed_before_the_marker(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[int] = []
    fill = grammars.GrammarMatcher._fill

    def counted(self: GrammarMatcher) -> None:
        masks.append(1)
        fill(self)

    monkeypatch.setattr(grammars.GrammarMatcher, "_fill", counted)
    params = SamplingParams(max_tokens=30, temperature=0, logits_processors=(begins_with(llm, "a" * 30),))
    llm.chat(TURNS, params, tools=TOOLS)
    assert masks == []


def test_an_answer_that_does_not_fit_up_to_the_marker_stays_free(llm: LLM) -> None:
    """A structured output replaces it; a marker that a stop string cuts does not hang the request."""
    params = SamplingParams(
        max_tokens=40, stop=("<tool",), logits_processors=(begins_with(llm, "<tool_call>"),)
    )
    (output,) = llm.chat(TURNS, params, tools=TOOLS)
    assert output.outputs[0].stop_reason == "<tool"


def test_a_grammar_of_too_much_work_is_given_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: GrammarMatcher, logits: npt.NDArray[np.float32]) -> None:
        raise InvalidSamplingError("too many items")

    monkeypatch.setattr(grammars.GrammarMatcher, "apply", refuse)
    assert len(answered(llm, "<tool_call>").token_ids) == 150
