"""What a group's reader gets: increments that sum to the output of the engine, however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_kit import byte_level

from carryall.errors import InvalidSamplingError, ProviderRuntimeError
from carryall.runtime.engine.requests.output_text import OutputText
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.requests.request_group import GrowingOutput, RequestGroup, sample_params
from carryall.runtime.engine.sampling.sampler import Sample, TokenLogprob
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.outputs import Delta
from carryall.runtime.types.sampling_params import SamplingParams

TEXT = "añ 漢字 end"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("group"))


def group_of(tokenizer: Tokenizer, **options: object) -> RequestGroup:
    params = SamplingParams(**{"max_tokens": 100, **options})  # type: ignore[arg-type]
    prompt = tokenizer.encode("p")
    requests = [
        Request(f"r{i}", prompt, each, text=OutputText(tokenizer, prompt, each))
        for i, each in enumerate(sample_params(params))
    ]
    return RequestGroup(params, requests)


def sample(token: int, logprob: float = -0.5) -> Sample:
    return Sample(token, (TokenLogprob(token, logprob, 1),))


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 30), max_size=5))
def test_deltas_sum_to_the_output(tokenizer: Tokenizer, cuts: list[int]) -> None:
    whole, cut = group_of(tokenizer, logprobs=0, n=2), group_of(tokenizer, logprobs=0, n=2)
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    output, deltas = GrowingOutput(cut), list[Delta]()
    for place, token in enumerate(tokens):
        for group in (whole, cut):
            for request in group.requests:
                request.append(sample(token))
        if place in cuts:
            news = cut.read()
            deltas += news
            state = output.add(news)
            assert not state.finished
            assert state.outputs[1].token_ids == tokens[: place + 1]
    for group in (whole, cut):
        for request in group.requests:
            request.finish("stop")
    expected = whole.output()
    news = cut.read()
    deltas += news
    state = output.add(news)
    assert [each.text for each in expected.outputs] == [TEXT, TEXT]
    assert state.outputs == expected.outputs
    assert state.finished
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    usage = deltas[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 2 * len(tokens)
    assert cut.read() == []


def test_a_group_without_news_gives_no_delta(tokenizer: Tokenizer) -> None:
    group = group_of(tokenizer)
    assert group.read() == []
    group.requests[0].append(sample(65))
    assert len(group.read()) == 1
    assert group.read() == []


def test_the_best_come_when_all_have_ended(tokenizer: Tokenizer) -> None:
    group = group_of(tokenizer, n=1, best_of=3)
    for request, logprob in zip(group.requests, (-2.0, -0.25, -1.0), strict=True):
        request.append(sample(65 + int(-4 * logprob), logprob))
        assert group.read() == []
        request.finish("length")
    (best,) = group.output().outputs
    assert (best.index, best.token_ids, best.finish_reason) == (0, [66], "length")
    assert (best.logprobs, best.cumulative_logprob) == (None, None)


@pytest.mark.parametrize(("invalid", "kind"), [(True, InvalidSamplingError), (False, ProviderRuntimeError)])
def test_a_failed_request_has_its_tokens_and_its_error(
    tokenizer: Tokenizer, invalid: bool, kind: type[Exception]
) -> None:
    group = group_of(tokenizer)
    group.requests[0].append(sample(65))
    group.requests[0].invalid = invalid
    group.requests[0].finish("error", error="out of memory")
    output = group.output()
    assert (output.error, output.outputs[0].finish_reason) == ("out of memory", "error")
    assert output.outputs[0].token_ids == [65]
    with pytest.raises(kind, match="out of memory"):
        output.check()


def test_a_fault_of_the_parser_ends_the_output_and_keeps_the_tokens(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: OutputText, limit: int, *, ended: bool) -> object:
        raise ValueError("no such character")

    monkeypatch.setattr(OutputText, "take", broken)
    group = group_of(tokenizer)
    group.requests[0].append(sample(65))
    output = group.output()
    assert output.finished
    assert output.error is not None
    assert "no such character" in output.error
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([65], "error")
