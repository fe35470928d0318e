"""Every field of SamplingParams and StructuredOutput is a flag, except for listed ones."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from carryall.cli.sampling import sampling_options, sampling_params
from carryall.options import declared
from carryall.runtime.models.generation_defaults import GenerationDefaults
from carryall.runtime.types.sampling_params import SamplingParams
from carryall.runtime.types.structured_output import StructuredOutput

NO_FLAGS = {
    "structured_output": "each of its forms is a flag",
    "logits_processors": "functions; --logits-processors imports those of the engine",
    "extra_args": "for logits processors of the engine, whatever they read",
    **dict.fromkeys(
        ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias", "bad_words"),
        "token ids, which nobody types; texts are for --stop and the structured forms",
    ),
    **dict.fromkeys(("dry_penalty_last_n", "dry_sequence_breakers"), "the defaults suit text"),
    **dict.fromkeys(
        ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"), "for measurements and programs"
    ),
    "reasoning_budget_message": "``serve`` has it for all requests, and programs set it",
    "watermark": "an object of secret numbers; requests and Python set it",
    **dict.fromkeys(("prompt_logprobs", "prompt_logprobs_start"), "carryall eval reports them"),
}


@pytest.fixture
def given() -> Any:
    """Return a function that parses flags to ``SamplingParams``; the checkpoint has the defaults ``own``."""
    seen: list[SamplingParams] = []

    def read(*args: str, **own: Any) -> SamplingParams:
        @click.command()
        @sampling_options()
        def command(**options: Any) -> None:
            model: Any = SimpleNamespace(defaults=GenerationDefaults(sampling=own))
            seen.append(sampling_params(model, options))

        result = CliRunner().invoke(command, list(args), standalone_mode=False)
        if result.exception is not None:
            raise result.exception
        return seen.pop()

    return read


def flags() -> dict[str, click.Option]:
    @click.command()
    @sampling_options()
    def command(**_: Any) -> None: ...

    return {one.name: one for one in command.params if isinstance(one, click.Option) and one.name}


def test_every_field_is_a_flag_with_help_or_there_is_a_reason() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    forms = {field.name for field in dataclasses.fields(StructuredOutput)}
    assert {*flags(), *NO_FLAGS} == fields | forms
    assert not set(flags()) & set(NO_FLAGS)
    assert [name for name, flag in flags().items() if not flag.help] == []
    assert [name for name, one in declared(SamplingParams).items() if not one.help] == []


@pytest.mark.parametrize("name", sorted(set(flags()) & set(declared(SamplingParams))))
def test_each_flag_sets_its_field_and_is_checked_as_the_field_is(name: str, given: Any) -> None:
    option = declared(SamplingParams)[name]
    if option.repeated:
        value: Any = ("a", "b")
    else:
        value = next(each for each in (2, 1, 0.5) if option.kinds == (float,) or each == int(each))
        value = min(option.kinds[0](value), option.most if option.most is not None else value)
    flag = flags()[name].opts[0]
    texts = [str(one) for one in (value if option.repeated else (value,))]
    params = given(*(part for text in texts for part in (flag, text)))
    assert getattr(params, name) == value
    assert params == SamplingParams(**{"temperature": 0.0, "max_tokens": 256, name: value})
    if not option.repeated:
        with pytest.raises(click.BadParameter, match=name):
            given(flag, "-3")


def test_flags_go_before_the_checkpoints_own_options(given: Any) -> None:
    assert given(temperature=0.5, top_k=3) == SamplingParams(temperature=0.5, top_k=3, max_tokens=256)
    assert given("--top-k", "4", top_k=3) == SamplingParams(top_k=4, max_tokens=256)


def test_no_limit_can_be_given(given: Any) -> None:
    assert given("--max-tokens", "none").max_tokens is None


def test_a_verb_can_leave_fields_out() -> None:
    @click.command()
    @sampling_options(without=("n", "best_of"))
    def command(**_: Any) -> None: ...

    assert {one.name for one in command.params} == set(flags()) - {"n", "best_of"}
