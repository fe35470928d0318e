"""A single request: its finish conditions and its output."""

from __future__ import annotations

from typing import Any

import pytest
from text_kit import byte_level

from carryall.runtime.engine.requests.output_text import OutputText
from carryall.runtime.engine.requests.request import Request, RequestStatus
from carryall.runtime.engine.requests.request_group import GrowingOutput, RequestGroup
from carryall.runtime.engine.sampling.sampler import Sample, TokenLogprob
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("request"))


def make(tokenizer: Tokenizer, **options: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 50, **options})
    prompt = tokenizer.encode("p")
    return Request("r", prompt, params, end_token_ids={257}, text=OutputText(tokenizer, prompt, params))


def text_of(request: Request) -> str:
    """The text of a request that was not read before."""
    return RequestGroup(request.params, [request]).output().outputs[0].text


def write(request: Request, tokenizer: Tokenizer, text: str) -> str:
    """Append a text's tokens until the request ends; return the tokens taken as text."""
    taken = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        if request.finished:
            break
        request.append(Sample(token))
        taken.append(token)
    return tokenizer.decode(taken)


def test_a_stop_string_counts_from_min_tokens_on(tokenizer: Tokenizer) -> None:
    request = make(tokenizer, stop=["ab"], min_tokens=5)
    assert write(request, tokenizer, "ababxxabyy") == "ababxxab"
    assert text_of(request) == "ababxx"
    assert (request.finish_reason, request.stop_reason) == ("stop", "ab")


def test_held_back_text_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    request = make(tokenizer, stop=["xyz"], max_tokens=4)
    group = RequestGroup(request.params, [request])
    output = GrowingOutput(group)
    write(request, tokenizer, "abx")
    assert output.add(group.read()).outputs[0].text == "ab"
    write(request, tokenizer, "y")
    assert request.finish_reason == "length"
    assert output.add(group.read()).outputs[0].text == "abxy"


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character(tokenizer: Tokenizer) -> None:
    request = make(tokenizer, max_tokens=2)
    first, *_ = tokenizer.encode("中", add_special_tokens=False)
    write(request, tokenizer, "a")
    request.append(Sample(first))
    assert text_of(request) == "a\N{REPLACEMENT CHARACTER}"


def test_a_state_is_not_changed_by_later_tokens(tokenizer: Tokenizer) -> None:
    request = make(tokenizer, logprobs=0)
    request.append(Sample(65, (TokenLogprob(65, -0.5, 1),)))
    group = RequestGroup(request.params, [request])
    output = GrowingOutput(group)
    state = output.add(group.read())
    before = (list(state.outputs[0].token_ids), state.outputs[0].text, state.outputs[0].logprobs)
    request.append(Sample(66, (TokenLogprob(66, -1.5, 2),)))
    later = output.add(group.read())
    completion = state.outputs[0]
    assert (completion.token_ids, completion.text, completion.logprobs) == before
    assert (state.finished, completion.cumulative_logprob) == (False, -0.5)
    assert later.outputs[0].cumulative_logprob == -2.0


def test_tokens_of_prompt_and_output_are_one_sequence_however_long(tokenizer: Tokenizer) -> None:
    request = make(tokenizer, max_tokens=None)
    write(request, tokenizer, "x" * 300)
    assert request.token_slice(0, request.num_tokens).tolist() == [
        *request.prompt_token_ids,
        *request.output_token_ids,
    ]
    assert request.token_slice(1, 3).base is not None


def test_the_end_token_s_text_is_kept_only_on_demand(tokenizer: Tokenizer) -> None:
    for include, text in ((False, "a"), (True, "a</s>")):
        request = make(tokenizer, include_stop_str_in_output=include, skip_special_tokens=False)
        write(request, tokenizer, "a")
        request.append(Sample(257))
        assert request.status is RequestStatus.FINISHED
        assert text_of(request) == text
        assert request.stop_reason == 257
