"""Programs that ask for too much, or never end: an error of ours soon, or they are cancelled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_kit import toy_model
from on_service import on_service

from carryall.errors import CarryallError, RequestError, UsageError
from carryall.program import ProgramCancelledError, assistant, gen, program, select, user
from carryall.runtime.api.llm import LLM

MANY = 3000  # more than the stack of Python has frames
CONTEXT = 512


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM(toy_model(tmp_path, context_length=CONTEXT, max_slots=8, end_token_ids=())) as llm:
        yield llm


def test_a_long_chain_of_places_fails_behind_the_one_that_fails(llm: LLM) -> None:
    @program(max_tokens=1)
    def chain(s: Any) -> str:
        s += "x" * (CONTEXT - 5)
        for number in range(MANY):
            s += gen(f"a{number}")
        return str(s[f"a{MANY - 1}"])  # each place has an error, or this waits forever

    with pytest.raises(RequestError, match="prompt is too long"):
        chain.run(llm)
    assert llm.stats().running == 0


def test_branches_of_branches_may_be_deeper_than_the_stack(llm: LLM) -> None:
    @program(max_tokens=2)
    def deep(s: Any) -> None:
        s += "x" + gen("a")
        for _ in range(MANY):
            (s,) = s.fork(1)
        s += gen("b")

    run = deep.run(llm)
    assert run.usage.completion_tokens == 4
    assert len(run.requests()) == 2


@pytest.mark.long
def test_thousands_of_branches_run_and_share_what_is_before_them(llm: LLM) -> None:
    @program(max_tokens=1)
    def wide(s: Any) -> None:
        s += "what all branches share "
        branches = [inner for outer in s.fork(32) for inner in outer.fork(32)]
        for branch in branches:
            branch += gen("a")

    usage = wide.run(llm).usage
    assert usage.completion_tokens == 1024
    assert usage.prompt_tokens - usage.cached_tokens < usage.prompt_tokens / 10


def forks(s: Any) -> None:
    while True:
        s.fork(1024)


def texts(s: Any) -> None:
    while True:
        s += "x"


def places(s: Any) -> None:
    while True:
        (branch,) = s.fork(1)
        branch += gen("a", max_tokens=1)


@pytest.mark.long
@pytest.mark.parametrize("endless", [forks, texts, places])
def test_a_program_without_end_is_cancelled(llm: LLM, endless: Callable[[Any], None]) -> None:
    def begun(s: Any) -> None:
        s += "x"
        endless(s)

    run = program(begun).start(llm)
    time.sleep(0.1)
    run.cancel()
    with pytest.raises(ProgramCancelledError):
        run.wait()
    assert llm.stats().running == llm.stats().waiting == 0


@pytest.mark.long
def test_thousands_of_choices_are_compared_and_can_be_cancelled(tmp_path: Path) -> None:
    choices = [f"choice {number}" for number in range(1000)]

    @program
    def chooses(s: Any) -> None:
        s += "x" + select("a", choices)

    with LLM(toy_model(tmp_path / "fast", context_length=CONTEXT, max_slots=8)) as llm:
        run = chooses.run(llm)
        scores = llm.score("x", choices)
        assert list(run.answer("a").scores.values()) == [score.mean for score in scores]
        assert run["a"] == choices[int(np.argmax([score.mean for score in scores]))]
    with LLM(toy_model(tmp_path / "slow", context_length=CONTEXT, step_seconds=0.01)) as llm:
        run = chooses.start(llm)
        while not llm.stats().computed_tokens:
            time.sleep(0.001)
        run.cancel()
        with pytest.raises(ProgramCancelledError):
            run.wait()
        assert llm.stats().finished < len(choices)
        assert llm.stats().running == llm.stats().waiting == 0


def test_a_program_that_calls_itself_without_end_leaves_nothing_running(llm: LLM) -> None:
    @program(max_tokens=1)
    def itself(s: Any) -> None:
        s += "x" + gen("a")
        itself(s)

    with pytest.raises(RecursionError):
        itself.run(llm)
    assert llm.stats().running == llm.stats().waiting == 0
    assert program(lambda s: s.__iadd__("x" + gen("a", max_tokens=2))).run(llm)["a"]


def test_a_program_cannot_wait_for_its_own_next_place(llm: LLM) -> None:
    @program(max_tokens=1)
    def waits(s: Any, branch: bool) -> None:
        s += "x" + gen("a")
        (other,) = s.fork(1)
        list((other if branch else s).stream("b"))

    for branch in (False, True):
        with pytest.raises(UsageError, match="no variable 'b'; it has: a"):
            waits.run(llm, branch)


def test_a_stream_of_a_branch_ends_with_the_program(llm: LLM) -> None:
    branches: list[Any] = []

    @program(max_tokens=1)
    def forked(s: Any) -> None:
        s += "x"
        branches.extend(s.fork(1))
        time.sleep(0.05)

    run = forked.start(llm)
    while not branches:
        time.sleep(0.001)
    with pytest.raises(UsageError, match="no variable 'b'; it has: none"):
        list(branches[0].stream("b"))
    run.wait()


async def asynchronous(s: Any) -> None:
    s += "x" + gen("a")


def generating(s: Any) -> Iterator[int]:
    s += "x" + gen("a")
    yield 1


@pytest.mark.parametrize("function", [asynchronous, generating])
def test_a_function_of_which_a_call_runs_nothing_is_refused(function: Any) -> None:
    with pytest.raises(UsageError, match="a program is a plain function"):
        program(function)


def deep_schema() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


ITSELF = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
NAMELESS: dict[str, Any] = {"type": "function", "function": {}}
HOSTILE: dict[str, tuple[Callable[[], Any], str]] = {
    "many choices of a grammar": (
        lambda: "x" + gen("a", choices=[f"choice {n}" for n in range(100_000)]),
        "characters, more than",
    ),
    "a choice longer than the context": (
        lambda: "x" + select("a", ["a" * 3_000_000, "b"]),
        "prompt is too long",
    ),
    "a choice that is half a pair": (lambda: "x" + select("a", ["\ud800", "b"]), "lone surrogate"),
    "a text that is half a pair": (lambda: "x\ud800" + gen("a"), "lone surrogate"),
    "a message that is half a pair": (lambda: user("\ud800") + assistant(gen("a")), "lone surrogate"),
    "a schema within itself": (lambda: "x" + gen("a", schema={"$ref": "#"}), "leads to itself"),
    "a schema that is no JSON": (lambda: "x" + gen("a", schema="{a"), "'{a' is no JSON"),
    "a schema that is null": (lambda: "x" + gen("a", schema="null"), "is no JSON schema"),
    "a deep schema as text": (lambda: "x" + gen("a", schema="[" * 100_000), "is no JSON"),
    "a deep schema": (lambda: "x" + gen("a", schema=deep_schema()), "nested too deeply"),
    "a grammar without end": (lambda: "x" + gen("a", grammar="start: start"), "cannot be met"),
    "a tool within itself": (
        lambda: user("x") + assistant(gen("a", tools=[ITSELF], tool_choice="f")),
        "leads to itself",
    ),
    "more messages than tokens": (
        lambda: sum((user("x") for _ in range(5000)), user("x")) + assistant(gen("a")),
        "5001 messages",
    ),
    "a tool without a name": (lambda: user("x") + assistant(gen("a", tools=[NAMELESS])), "a tool is"),
    "a tool that is no JSON": (
        lambda: user("x") + assistant(gen("a", tools=[{**ITSELF, "x": float("nan")}])),
        "the tool 'f' cannot be written as JSON",
    ),
    "a demanded tool that is not there": (
        lambda: user("x") + assistant(gen("a", tools=[ITSELF], tool_choice="g")),
        "'g'; the tools of the place are: 'f'",
    ),
    "a demanded call without tools": (
        lambda: user("x") + assistant(gen("a", tool_choice="required")),
        "the tools of the place are: 'none'",
    ),
    "a variable that is taken": (
        lambda: user("x") + assistant(gen("a", template={"messages": []})),
        "'messages' cannot be a chat template variable",
    ),
    "a variable that is no JSON": (
        lambda: user("x") + assistant(select("a", ["b", "c"], template={"x": object()})),
        "cannot be written as JSON",
    ),
    "variables that are no mapping": (
        lambda: user("x") + assistant(gen("a", template=[1])),  # type: ignore[arg-type]
        "template must be variables",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
def test_what_asks_for_too_much_is_refused_here(llm: LLM, name: str) -> None:
    parts, message = HOSTILE[name]
    with pytest.raises(CarryallError, match=message):
        program(lambda s: s.__iadd__(parts())).run(llm)


def test_what_asks_for_too_much_is_refused_on_a_service() -> None:
    def work(url: str) -> None:
        for parts, message in HOSTILE.values():
            with pytest.raises(CarryallError, match=message):
                program(lambda s, made=parts: s.__iadd__(made())).run(url)
        many = [f"c{number}" for number in range(3000)]
        with pytest.raises(RequestError, match="'continuations' has 3000 texts; the maximum is 2048"):
            program(lambda s: s.__iadd__("x y" + select("a", many))).run(url)
        assert program(lambda s: s.__iadd__("x" + gen("a", max_tokens=2))).run(url)["a"]

    on_service(work)
