"""Structured outputs conform for every seed, and do not change other requests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llm_kit import toy_model

from carryall.errors import InvalidSamplingError, RequestError, UsageError
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.llm import LLM
from carryall.runtime.engine.engine import EngineConfig
from carryall.runtime.types.sampling_params import SamplingParams
from carryall.runtime.types.structured_output import StructuredOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"regex": "[0-9]{3}-[a-c]{1,5}"},
    {"choice": ["yes", 'n"o', "mäh"]},
    {"grammar": 'start: "<" inner? ">"\ninner: "x" | start'},
    {"json_schema": PERSON},
]


def options(seed: int, form: dict[str, Any] | None, **more: Any) -> SamplingParams:
    base = {"seed": seed, "temperature": 2.0, "max_tokens": 200, "structured_output": form}
    return SamplingParams.from_dict({**base, **more})


def fits(text: str, form: dict[str, Any]) -> bool:
    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    if "choice" in form:
        return text in form["choice"]
    if "grammar" in form:
        return re.fullmatch(r"(<+)x?(>+)", text) is not None and text.count("<") == text.count(">")
    person = json.loads(text)
    return (
        set(person) == {"name", "age", "kind"}
        and len(person["name"]) <= 5
        and 0 <= person["age"] <= 150
        and person["kind"] in ("cat", "dog")
    )


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(toy_model(tmp_path_factory.mktemp("toy"), context_length=512)) as llm:
        yield llm


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32), form=st.sampled_from(FORMS))
def test_the_output_has_the_form_whatever_the_seed(llm: LLM, seed: int, form: dict[str, Any]) -> None:
    (output,) = llm.generate("go", options(seed, form))
    assert output.error is None
    assert output.outputs[0].finish_reason == "stop"
    assert fits(output.outputs[0].text, form)


def test_many_choices(llm: LLM) -> None:
    choices = [str(number) for number in range(5000)]
    (output,) = llm.generate("go", options(1, {"choice": choices}))
    assert output.error is None
    assert output.outputs[0].text in choices


@pytest.mark.parametrize(
    "form",
    [
        {"regex": r"[^\s\S]"},
        {"grammar": "start: start"},
        {"json_schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    ],
)
def test_an_unsatisfiable_schema_is_refused(llm: LLM, form: dict[str, Any]) -> None:
    with pytest.raises(InvalidSamplingError, match=r"cannot be met|leads to itself"):
        llm.generate("go", options(0, form))


def test_on_the_embedded_model() -> None:
    with LLM("demo", max_slots=4, num_threads=1) as demo:
        many = [options(seed, form) for seed, form in enumerate([*FORMS, {"json_object": True}])]
        outputs = demo.generate(["def f(x):\n"] * 5, many)
    for output, form in zip(outputs, FORMS, strict=False):
        completion = output.outputs[0]
        assert completion.finish_reason == "length" or fits(completion.text, form)
    assert [output.outputs[0].finish_reason for output in outputs].count("stop") >= 3


@pytest.mark.parametrize("kv_bytes", [None, 300 * 1024])
def test_batch_equals_single_with_and_without_a_form(tmp_path: Path, llm: LLM, kv_bytes: int | None) -> None:
    forms = [None, None, *FORMS, *FORMS]  # the texts of the first two do not fit beside each other
    params = [options(seed, form) for seed, form in enumerate(forms)]
    prompts = [f"prompt {i}" * (i % 3 + 1) for i in range(len(forms))]
    alone = [llm.generate(prompt, p)[0].outputs for prompt, p in zip(prompts, params, strict=True)]
    config = EngineConfig(kv_bytes=kv_bytes)
    with LLM(toy_model(tmp_path, context_length=512), engine_config=config) as batch:
        together = [output.outputs for output in batch.generate(prompts, params)]
        assert (batch.stats().preemptions > 0) == (kv_bytes is not None)
    assert together == alone


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "[0-9"}, "regex cannot be used: .*unclosed character class"),
        ({"json_schema": {"type": "foo"}}, "json_schema cannot be used: Invalid type: foo"),
        ({"json_schema": "{"}, "json_schema is not valid JSON"),
        ({"grammar": "start: nowhere"}, "grammar cannot be used: .*unknown name"),
    ],
)
def test_a_form_that_cannot_be_is_the_request_s_fault(llm: LLM, form: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSamplingError, match=re.compile(words, re.DOTALL)):
        llm.generate(["a", "b"], [options(0, None), options(1, form)])
    assert llm.generate("a", options(0, None))[0].error is None


def test_a_refused_form_ends_its_stream_and_no_other(tmp_path: Path) -> None:
    async def both() -> tuple[str, str]:
        llm = AsyncLLM(toy_model(tmp_path))
        try:
            good = await llm.add_request("a", options(1, FORMS[0]))
            bad = await llm.add_request("a", options(1, {"regex": "("}))
            with pytest.raises(RequestError, match="regex cannot be used") as caught:
                await anext(bad)
            states = [state async for state in good]
            return states[-1].outputs[0].text, str(caught.value)
        finally:
            llm.shutdown()

    text, _ = asyncio.run(both())
    assert fits(text, FORMS[0])


def test_a_form_needs_a_tokenizer(tmp_path: Path) -> None:
    bare = LLM(toy_model(tmp_path, tokenizer=False))
    with bare, pytest.raises(UsageError, match="has no tokenizer"):
        bare.generate([1, 2], options(0, FORMS[0]))


def test_equal_forms_are_compiled_once(llm: LLM) -> None:
    llm.generate(["a", "b"], options(0, {"regex": "q+w"}, max_tokens=2))
    grammars = llm.requests.grammars
    assert grammars is not None
    before = dict(grammars._compiled)
    llm.generate("c", options(0, {"regex": "q+w"}, max_tokens=2))
    assert dict(grammars._compiled) == before
    for i in range(150):
        grammars.compile(StructuredOutput(regex=f"x{{{i}}}"))
    assert len(grammars._compiled) == 128


def test_deep_grammars_do_not_end_the_process(llm: LLM) -> None:
    """5,000 references in a chain need more stack than a thread usually has."""
    chain: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)}
    schema = {"$defs": {**chain, "a5000": {"enum": ["deep"]}}, "$ref": "#/$defs/a0"}
    (output,) = llm.generate("a", options(0, {"json_schema": schema}))
    assert output.outputs[0].text == '"deep"'


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, "needs one of json_schema, json_object"),
        ({"regex": "a", "json_object": True}, "needs one of .* not"),
        ({"regex": 5}, "regex of structured_output cannot be 5"),
        ({"choice": "yes"}, "choice must be a list of texts"),
        ({"choice": 5}, "choice must be a list of texts"),
        ({"choice": [1]}, "choice of structured_output cannot be"),
        ({"json_schema": {"a": {1, 2}}}, "is not valid JSON"),
        ({"regex": "a" * 2_000_000}, "regex has 2000000 characters"),
        ({"regx": "a"}, "structured_output cannot be"),
        (7, "structured_output cannot be 7"),
    ],
)
def test_bad_demands_are_refused_at_once(form: Any, words: str) -> None:
    with pytest.raises(InvalidSamplingError, match=words):
        SamplingParams(structured_output=form)
