"""Programs on a model in this process: what is asked for, what is shared, and what goes wrong."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_kit import toy_model

from carryall.errors import CarryallError, ChatTemplateError, RequestError, UsageError
from carryall.program import (
    ProgramCancelledError,
    assistant,
    gen,
    image,
    program,
    select,
    system,
    tool_result,
    user,
)
from carryall.runtime.api.llm import LLM
from carryall.runtime.program.parts import ImageItem, Turn, parts_of
from carryall.runtime.types.sampling_params import SamplingParams

PREFIX = "a text of more than thirty tokens, which is shared: "
LETTERS: dict[str, Any] = {"allowed_token_ids": tuple(range(64, 90))}  # a to z


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM(toy_model(tmp_path, context_length=512, max_slots=8, end_token_ids=())) as llm:
        yield llm


def said(llm: LLM, prompt: Any, **options: Any) -> str:
    """What a single request answers."""
    (output,) = llm.generate(prompt, SamplingParams(**{**LETTERS, "temperature": 0, **options}))
    return output.outputs[0].text


def talk(llm: LLM, *messages: tuple[str, str], continues: bool = False) -> Any:
    turns = [{"role": role, "content": text} for role, text in messages]
    return llm.render_chat(turns, continue_final_message=continues)


def test_places_of_a_text_are_answered_like_single_requests(llm: LLM) -> None:
    @program(temperature=0, **LETTERS)
    def two(s: Any) -> None:
        s += PREFIX + gen("a", max_tokens=5) + ", then "
        s += gen("b", max_tokens=7)

    run = two.run(llm)
    first = said(llm, PREFIX, max_tokens=5)
    assert run["a"] == first
    assert run["b"] == said(llm, f"{PREFIX}{first}, then ", max_tokens=7)
    assert run.text == f"{PREFIX}{first}, then {run['b']}"
    assert run.variables == {"a": first, "b": run["b"]}
    assert run.answer("a").finish_reason == "length"


def test_turns_become_messages_of_the_template(llm: LLM) -> None:
    @program(temperature=0, max_tokens=4, **LETTERS)
    def chat(s: Any) -> str:
        s += system("be") + user("one")
        s += assistant(gen("a"))
        s += user("two")
        s += gen("b") + "!" + gen("c")  # of the assistant, outside of a turn
        s += assistant(gen("d"))  # a turn of its own
        return str(s["a"])

    run = chat.run(llm)
    a, b, c, d = (run[name] for name in "abcd")
    begin: tuple[tuple[str, str], ...] = ("system", "be"), ("user", "one")
    assert run.returned == a == said(llm, talk(llm, *begin), max_tokens=4)
    begin = *begin, ("assistant", a), ("user", "two")
    assert b == said(llm, talk(llm, *begin), max_tokens=4)
    continued = talk(llm, *begin, ("assistant", f"{b}!"), continues=True)
    assert c == said(llm, continued, max_tokens=4)
    begin = *begin, ("assistant", f"{b}!{c}")
    assert d == said(llm, talk(llm, *begin), max_tokens=4)
    assert run.messages == [{"role": role, "content": text} for role, text in (*begin, ("assistant", d))]
    assert run.text.splitlines()[0] == "system: be"


def test_branches_go_on_from_the_same_point_and_compute_it_once(llm: LLM) -> None:
    @program(temperature=0, max_tokens=2, **LETTERS)
    def forked(s: Any) -> Any:
        s += PREFIX + gen("start")
        branches = s.fork(4)
        for number, branch in enumerate(branches):
            branch += f" branch {number}: " + gen("end")
        branches += "."
        return branches.join()

    before = llm.stats().computed_tokens
    run = forked.run(llm)
    start = said(llm, PREFIX, max_tokens=2)
    ends = [said(llm, f"{PREFIX}{start} branch {number}: ", max_tokens=2) for number in range(4)]
    assert run.returned == {"start": [start] * 4, "end": ends}
    assert run.variables == {"start": start}  # those of the branches are theirs
    # The prefix once; of each branch its own text, the tokens that it generates, and what the tree lacks.
    usage = run.usage
    assert usage.completion_tokens == 2 + 4 * 2
    computed = usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens
    assert computed < len(PREFIX) + 4 * 20 < usage.prompt_tokens / 2
    assert llm.stats().computed_tokens > before


def test_branches_run_in_the_same_steps(tmp_path: Path) -> None:
    @program(temperature=0, max_tokens=40, ignore_eos=True, **LETTERS)
    def forked(s: Any) -> None:
        s += PREFIX
        branches = s.fork(8)
        for number, branch in enumerate(branches):
            branch += f"{number}" + gen("x")

    # A step takes longer than a thread needs to begin, also on a busy machine.
    with LLM(toy_model(tmp_path, context_length=512, max_slots=8, step_seconds=0.01)) as llm:
        forked.run(llm)
        assert llm.stats().steps < 8 * 40 / 2  # one after another would be 320


def test_select_takes_the_choice_of_the_largest_mean(llm: LLM) -> None:
    choices = ["yes", "no", "perhaps not"]

    @program
    def pick(s: Any) -> None:
        s += PREFIX + select("word", choices)

    run = pick.run(llm)
    means = {}
    for choice in choices:
        total = 0.0
        for place in range(len(choice)):
            (*tokens, token) = llm.encode(PREFIX + choice[: place + 1])
            params = SamplingParams(max_tokens=1, logprobs=0, logprob_token_ids=(token,))
            (entry,) = llm.generate(tokens, params)[0].outputs[0].logprobs or []
            total += entry[token].logprob
        means[choice] = total / len(choice)
    assert run.answer("word").scores == pytest.approx(means)
    assert run["word"] == max(choices, key=means.__getitem__)
    assert run.text == PREFIX + run["word"]


def test_select_in_a_chat_scores_what_the_template_renders(llm: LLM) -> None:
    @program
    def pick(s: Any) -> None:
        s += user("is it?")
        s += assistant("It is ", select("word", ["yes", "no"]))
        s += user("and?")
        s += assistant(select("next", ["yes", "no"]))

    run = pick.run(llm)
    rendered = llm.decode(talk(llm, ("user", "is it?"), ("assistant", "It is "), continues=True).token_ids)
    expected = llm.score(rendered, ["yes", "no"])
    assert list(run.answer("word").scores.values()) == [score.mean for score in expected]
    turns = ("user", "is it?"), ("assistant", f"It is {run['word']}"), ("user", "and?")
    expected = llm.score(llm.decode(talk(llm, *turns).token_ids), ["yes", "no"])
    assert list(run.answer("next").scores.values()) == [score.mean for score in expected]


def test_the_text_before_choices_is_computed_once(llm: LLM) -> None:
    @program
    def pick(s: Any) -> None:
        s += PREFIX * 3 + select("word", [f"{letter} choice" for letter in "abcdef"])

    pick.run(llm)
    assert llm.stats().computed_tokens < len(PREFIX) * 3 + 6 * 16


def wrong(value: Any) -> Any:
    """A value that the types do not allow."""
    return value


BOOLEAN = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"regex": "[0-9]{3}"}, r"\d{3}"),
        ({"choices": ["red", "green"]}, "red|green"),
        (
            {"schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
            r"\{.*\}",
        ),
        ({"grammar": 'start: "a" "b"+ "."'}, r"ab+\."),
    ],
)
def test_formats_hold(llm: LLM, options: dict[str, Any], pattern: str) -> None:
    @program(temperature=0, max_tokens=60)
    def formed(s: Any) -> None:
        s += PREFIX + gen("x", **options)

    answer = formed.run(llm).answer("x")
    if answer.finish_reason == "stop":
        assert re.fullmatch(pattern, answer.text, re.DOTALL)


class Form:
    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return {"enum": [7]}


def test_a_class_of_pydantic_is_a_schema(llm: LLM) -> None:
    @program
    def formed(s: Any) -> None:
        s += "x" + gen("x", schema=Form)

    assert formed.run(llm)["x"] == "7"


def test_an_option_of_the_place_wins_over_the_programs_and_the_models(tmp_path: Path) -> None:
    with LLM(toy_model(tmp_path, end_token_ids=(), sampling={"temperature": 0.0})) as llm:

        @program(max_tokens=3)
        def lengths(s: Any) -> None:
            s += "x" + gen("a", **LETTERS) + gen("b", max_tokens=5, **LETTERS)

        run = lengths.run(llm)
        assert (len(run["a"]), len(run["b"])) == (3, 5)
        assert run["a"] == said(llm, "x", max_tokens=3)  # the model's own temperature


def test_a_batch_shares_prefixes_and_keeps_the_order(llm: LLM) -> None:
    @program(temperature=0, max_tokens=3, **LETTERS)
    def answer(s: Any, question: str) -> None:
        s += PREFIX * 2 + question + gen("a")

    questions = [f"question {number}?" for number in range(8)]
    runs = answer.run_batch(llm, [{"question": question} for question in questions], parallel=8)
    computed = llm.stats().computed_tokens
    assert [run["a"] for run in runs] == [
        said(llm, PREFIX * 2 + question, max_tokens=3) for question in questions
    ]
    assert computed < len(PREFIX) * 2 + 8 * 20


def test_a_program_streams_by_variable(llm: LLM) -> None:
    @program(temperature=0, max_tokens=6, **LETTERS)
    def two(s: Any, begin: str) -> None:
        s += begin + gen("a") + " " + gen("b")

    run = two.start(llm, begin=PREFIX)
    pieces = {name: list(run.stream(name)) for name in "ba"}
    run.wait()
    assert {name: "".join(parts) for name, parts in pieces.items()} == run.variables
    assert len(pieces["b"]) > 1
    assert list(run.stream("a")) == pieces["a"]  # again
    with pytest.raises(UsageError, match="no variable 'c'; it has: a, b"):
        list(run.stream("c"))


def test_a_started_program_is_cancelled(tmp_path: Path) -> None:
    with LLM(toy_model(tmp_path, step_seconds=0.01, end_token_ids=())) as llm:

        @program(max_tokens=200, **LETTERS)
        def long(s: Any) -> None:
            s += "x" + gen("a") + gen("b")

        run = long.start(llm)
        assert next(run.stream("a"))
        run.cancel()
        with pytest.raises(ProgramCancelledError):
            run.wait()
        with pytest.raises(ProgramCancelledError):
            run["b"]
        assert llm.stats().running == 0
        assert llm.stats().cancelled == 1


def test_what_a_function_raises_ends_its_requests(tmp_path: Path) -> None:
    with LLM(toy_model(tmp_path, step_seconds=0.01, end_token_ids=())) as llm:

        @program(max_tokens=200, **LETTERS)
        def broken(s: Any) -> None:
            s += "x" + gen("a")
            raise LookupError("of the function")

        with pytest.raises(LookupError, match="of the function"):
            broken.run(llm)
        assert llm.stats().running == 0
        run = broken.start(llm)
        with pytest.raises(LookupError, match="of the function"):
            run.wait()


def test_a_failed_request_fails_what_is_behind_it_and_no_other(llm: LLM) -> None:
    @program(temperature=0, max_tokens=2, **LETTERS)
    def some(s: Any, length: int) -> None:
        s += "x" * length + gen("a")
        s += gen("b")

    with pytest.raises(RequestError, match="context"):
        some.run(llm, 600)
    before = threading.active_count()
    good, bad = some.run_batch(llm, [{"length": 3}, {"length": 600}], return_errors=True)
    assert isinstance(bad, RequestError)
    assert not isinstance(good, Exception)
    assert good["b"]
    with pytest.raises(RequestError, match="context"):
        some.run_batch(llm, [{"length": 600}, {"length": 3}])
    assert threading.active_count() <= before + 2


def test_a_model_without_a_template_runs_texts_only(tmp_path: Path) -> None:
    model = toy_model(tmp_path)
    model.chat_template = type(model.chat_template)({}, {})
    with LLM(model) as llm:

        @program(max_tokens=1)
        def chat(s: Any) -> None:
            s += user("x") + assistant(gen("a"))

        with pytest.raises(ChatTemplateError, match="no chat template"):
            chat.run(llm)


def test_a_call_of_a_tool_and_its_result_are_messages(tmp_path: Path) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]},
        },
    }
    with LLM(toy_model(tmp_path, context_length=2048, end_token_ids=())) as llm:

        @program(temperature=0, max_tokens=120)
        def calls(s: Any) -> None:
            s += user("call")
            s += assistant(gen("call", tools=[tool], tool_choice="required"))
            for call in s.answer("call").tool_calls[:1]:
                s += tool_result(call, "2")
            s += assistant(gen("end", max_tokens=2))

        run = calls.run(llm)
        call = run.answer("call").tool_calls[0]
        assert (call.name, json.loads(call.arguments)) == ("add", {"n": 1})
        kinds = [message["role"] for message in run.messages]
        assert kinds == ["user", "assistant", "tool", "assistant"]
        assert run.messages[2] == {"role": "tool", "content": "2", "tool_call_id": call.id}


def test_pictures_are_parts_of_a_message(tmp_path: Path, llm: LLM) -> None:
    (tmp_path / "picture").write_bytes(b"\x89PNG")

    @program(max_tokens=1)
    def see(s: Any, source: Any) -> None:
        s += user("What is it?", image(source))
        s += assistant(gen("a"))

    for source in (b"\x89PNG", tmp_path / "picture", "data:image/png;base64,iVBORw=="):
        with pytest.raises(RequestError, match="reads text only"):
            see.run(llm, source)
    assert image(b"ab").items == (ImageItem("data:image/png;base64,YWI="),)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda s: s.__iadd__(5), "takes texts"),
        (lambda s: s.__iadd__("a" + user("b")), "a text or a chat"),
        (lambda s: s.__iadd__(user(gen("a"))), "writes turns of the assistant only"),
        (lambda s: s.__iadd__(user(assistant("a"))), "cannot hold another turn"),
        (lambda s: s.__iadd__(gen("a", n=2)), "no option of a program"),
        (lambda s: s.__iadd__(gen("a", temperature=-1)), "temperature"),
        (lambda s: s.__iadd__(gen("a", heat=1)), "heat"),
        (lambda s: s.__iadd__(gen("a", regex="a", choices=["b"])), "one of"),
        (lambda s: s.__iadd__(gen("a", choices=[])), "at least one text"),
        (lambda s: s.__iadd__(gen("a", choices="yes")), "at least one text"),
        (lambda s: s.__iadd__(gen(wrong(3))), "name of a variable"),
        (lambda s: s.__iadd__(gen("a", tools=[wrong("x")])), "a tool is"),
        (lambda s: s.__iadd__("x" + gen("a", tools=[{"function": {"name": "f"}}])), "need a chat"),
        (lambda s: s.__iadd__(select("a", ["b"])), "at least two"),
        (lambda s: s.__iadd__(select("a", ["b", "b"])), "at least two"),
        (lambda s: s.__iadd__(select("a", ["b", ""])), "at least two"),
        (lambda s: s.__iadd__("x" + image(b"x")), "belongs into a message of the user"),
        (lambda s: s.__iadd__(image("missing.png")), "cannot read the picture"),
        (lambda s: s.__iadd__(tool_result(wrong("x"), "y")), "one of an answer's tool_calls"),
        (lambda s: s.fork(0), "from 1 to 1024"),
        (lambda s: s["x"], "no variable 'x'; it has: none"),
        (lambda s: s.messages, "without messages"),
    ],
)
def test_what_a_program_must_not_do_is_told(llm: LLM, write: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        program(write).run(llm)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.run(3), "runs on an LLM"),
        (lambda p: p.run("ftp://x"), "a service is http"),
        (lambda p: p.run_batch("http://x", {"a": 1}), "a list of mappings"),
        (lambda p: p.run_batch("http://x", [3]), "a mapping by name"),
        (lambda p: p.run_batch("http://x", [{}], parallel=0), "parallel"),
        (lambda p: program(wrong(3)), "a function of a conversation"),
        (lambda p: program(best_of=3), "no option of a program"),
        (lambda p: program(max_tokens=0), "max_tokens"),
    ],
)
def test_wrong_arguments_of_a_run_are_told(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(program(lambda s: None))


TEXTS = st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=5)


@given(st.lists(st.one_of(TEXTS, TEXTS.map(lambda text: gen(text or None)), TEXTS.map(user))))
@settings(max_examples=50)
def test_parts_join_in_any_grouping(parts: list[Any]) -> None:
    whole = parts_of("")
    for part in parts:
        whole = whole + part
    nested = parts_of("")
    for part in reversed(parts):
        nested = parts_of(part) + nested
    assert whole == nested
    assert sum(isinstance(item, Turn) for item in whole.items) == sum(
        not isinstance(part, str) and isinstance(part.items[0], Turn) for part in parts
    )


def test_a_program_is_a_part_of_another(llm: LLM) -> None:
    @program(max_tokens=2, temperature=0, **LETTERS)
    def inner(s: Any, word: str) -> str:
        s += word + gen("a")
        return str(s["a"])

    @program(max_tokens=2, temperature=0, **LETTERS)
    def outer(s: Any) -> None:
        s += PREFIX
        inner(s, "b")

    assert outer.run(llm)["a"] == said(llm, PREFIX + "b", max_tokens=2)
    assert wrong(inner).__name__ == "inner"


def test_a_closed_model_tells_so(llm: LLM) -> None:
    llm.close()
    with pytest.raises(CarryallError, match="closed"):
        program(lambda s: s.__iadd__("x" + gen("a"))).run(llm)


def test_scores_are_log_probabilities(llm: LLM) -> None:
    run = program(lambda s: s.__iadd__("x" + select("a", ["b", "c"]))).run(llm)
    assert all(-math.inf < score < 0 for score in run.answer("a").scores.values())
