"""Parsing of chat outputs (reasoning, tool calls). The toy model generates the text that a test gives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from llm_kit import toy_model

from carryall.errors import UsageError
from carryall.providers.base import Row, RunnerConfig
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.api.llm import LLM
from carryall.runtime.models.loading import LoadedModel
from carryall.runtime.text.chat_template import ChatTemplate
from carryall.runtime.types.outputs import RequestOutput
from carryall.runtime.types.sampling_params import SamplingParams

HERMES = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{# tools <tool_call> <think></think> #}"
)
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
ASK = [{"role": "user", "content": "time?"}]
ANSWER = (
    '<think>hm</think>\n\nLet me see.\n<tool_call>\n{"name": "now", "arguments": {"zone": "é"}}\n</tool_call>'
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


class Parrot(NullRunner):
    """A toy runner that generates a given text and then the end token."""

    def __init__(self, said: Sequence[int], prompt_length: int) -> None:
        super().__init__(RunnerConfig(max_slots=4, context_length=512), NullOptions(vocab_size=258))
        self._said, self._prompt_length = said, prompt_length

    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        """Run the toy model; make the next token of the text the most likely one."""
        results = [result.copy() for result in super().forward(rows)]
        for row, result in zip(rows, results, strict=True):
            end = row.start + len(row.tokens)
            for place, logits in enumerate(result, start=end - len(result) + 1):
                if place >= self._prompt_length:  # proposals may go on behind the end
                    said = min(place - self._prompt_length, len(self._said) - 1)
                    logits[self._said[said]] = 1000.0
        return results


@pytest.fixture
def parrot(tmp_path: Path) -> Iterator[LLM]:
    toy = toy_model(tmp_path)
    template = ChatTemplate({"default": HERMES}, {})
    assert toy.tokenizer is not None
    prompt = toy.tokenizer.encode(template.render(ASK), add_special_tokens=False)
    said = [*toy.tokenizer.encode(ANSWER, add_special_tokens=False), *toy.defaults.end_token_ids]
    model = LoadedModel("parrot", Parrot(said, len(prompt)), toy.tokenizer, template, toy.defaults)
    with LLM(model) as llm:
        yield llm


def test_chat_takes_the_answer_apart(parrot: LLM) -> None:
    (output,) = parrot.chat(ASK, GREEDY, tools=TOOLS)
    completion = output.outputs[0]
    assert (completion.text, completion.reasoning_content) == ("Let me see.", "hm")
    (call,) = completion.tool_calls
    assert (call.name, call.arguments) == ("now", '{"zone": "é"}')
    assert completion.finish_reason == "stop"


def test_without_tools_a_call_is_content(parrot: LLM) -> None:
    (output,) = parrot.chat(ASK, GREEDY)
    assert output.outputs[0].text == ANSWER.split("</think>\n\n")[1]
    assert output.outputs[0].tool_calls == []


def test_generate_gives_the_whole_text(parrot: LLM) -> None:
    (output,) = parrot.generate(parrot.render_chat(ASK).token_ids, GREEDY)
    assert (output.outputs[0].text, output.outputs[0].reasoning_content) == (ANSWER, None)


def test_each_sample_has_a_parser_of_its_own_and_a_stream_ends_as_the_whole(parrot: LLM) -> None:
    prompt = parrot.render_chat(ASK, tools=TOOLS)
    states: list[RequestOutput] = list(
        parrot.stream(prompt, SamplingParams(temperature=0.0, n=2, max_tokens=None))
    )
    for completion in states[-1].outputs:
        assert (completion.text, completion.reasoning_content) == ("Let me see.", "hm")
        assert [call.name for call in completion.tool_calls] == ["now"]
    seen = [state.outputs[0].text for state in states]
    assert all(after.startswith(before) for before, after in itertools.pairwise(seen))


def test_an_unknown_style_is_refused(parrot: LLM) -> None:
    with pytest.raises(UsageError, match="no tool call style"):
        parrot.chat(ASK, GREEDY, tools=TOOLS, tool_style="morse")


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 50])
def test_a_thought_ends_at_its_budget(parrot: LLM, budget: int) -> None:
    """The toy model says ``<think>hm</think>``, a token each character; then it goes on where it would be."""
    params = SamplingParams(temperature=0.0, max_tokens=100, reasoning_budget=budget)
    (output,) = parrot.chat(ASK, params, tools=TOOLS)
    completion = output.outputs[0]
    assert (completion.reasoning_content or "") == "hm"[:budget]
    assert completion.reasoning_tokens <= budget + len("</think>")
    free = parrot.chat(ASK, SamplingParams(temperature=0.0, max_tokens=100), tools=TOOLS)[0].outputs[0]
    if budget > 2:
        assert (completion.token_ids, completion.text) == (free.token_ids, free.text)
