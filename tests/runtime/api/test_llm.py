"""LLM, the Python API, on the toy model."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llm_kit import toy_model

from carryall.errors import (
    CarryallWarning,
    EngineClosedError,
    InvalidSamplingError,
    PromptTooLongError,
    ProviderRuntimeError,
    QueueFullError,
    RequestError,
    UsageError,
)
from carryall.providers.targets.null import NullRunner
from carryall.runtime.api.llm import LLM
from carryall.runtime.engine.engine import EngineConfig
from carryall.runtime.process.garbage import lasting_objects
from carryall.runtime.types.outputs import RequestOutput
from carryall.runtime.types.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM(toy_model(tmp_path)) as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def greedy(**options: object) -> SamplingParams:
    return SamplingParams.from_dict({"temperature": 0.0, "max_tokens": 20, **options})


def test_one_or_many_prompts_text_or_tokens_in_their_order(llm: LLM) -> None:
    texts = [f"prompt {'x' * (7 * i % 5)}" for i in range(9)]
    together = llm.generate(texts, GREEDY)
    assert [output.prompt for output in together] == texts
    assert tokens(together) == [tokens(llm.generate(text, GREEDY))[0] for text in texts]
    ids = [llm.encode(text) for text in texts]
    assert tokens(llm.generate(ids, GREEDY)) == tokens(together)
    (single,) = llm.generate(ids[0], GREEDY)
    assert (single.prompt, single.prompt_token_ids) == (None, ids[0])
    assert llm.generate([], GREEDY) == []


def test_arrays_are_token_ids_too_and_anything_else_is_refused(llm: LLM) -> None:
    arrays = [np.array([1, 2, 3]), np.array([4, 5], np.int32)]
    outputs = llm.generate(arrays, GREEDY)  # type: ignore[arg-type]
    assert [output.prompt_token_ids for output in outputs] == [[1, 2, 3], [4, 5]]
    assert type(outputs[0].prompt_token_ids[0]) is int
    assert tokens(llm.generate(arrays[0], GREEDY)) == tokens(outputs)[:1]
    for wrong in ([None], [[1.5]], [["a"]]):
        with pytest.raises(RequestError, match="a prompt must be a text, a list of token ids"):
            llm.generate(wrong, GREEDY)  # type: ignore[arg-type]


def test_each_prompt_may_have_its_own_options(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [greedy(max_tokens=2), greedy(max_tokens=5)])
    assert [len(ids) for ids in tokens(outputs)] == [2, 5]
    with pytest.raises(UsageError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_text_is_the_decoded_output(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY)
    completion = output.outputs[0]
    assert completion.text == llm.decode(completion.token_ids)
    assert (output.finished, completion.finish_reason, completion.stop_reason) == (True, "length", None)
    assert output.metrics is not None
    assert output.metrics.finished is not None
    assert output.metrics.first_token is not None
    assert output.metrics.arrival <= output.metrics.first_token <= output.metrics.finished


@pytest.mark.parametrize("options", [{}, {"stop": [" "]}, {"logprobs": 2}, {"seed": 4, "temperature": 1.0}])
def test_stream_grows_into_what_generate_returns(llm: LLM, options: dict[str, object]) -> None:
    params = greedy(**options)
    (whole,) = llm.generate("a long prompt", params)
    states = list(llm.stream("a long prompt", params))
    final = states[-1].outputs[0]
    assert final == whole.outputs[0]
    assert [state.finished for state in states] == [False] * (len(states) - 1) + [True]
    for i, state in enumerate(states, start=1):
        assert state.outputs[0].token_ids == final.token_ids[:i]
        assert final.text.startswith(state.outputs[0].text)


def test_leaving_a_stream_frees_its_slot(llm: LLM) -> None:
    for _ in llm.stream("prompt", GREEDY):
        assert llm.stats().running == 1
        break
    assert (llm.stats().running, llm.stats().cancelled) == (0, 1)


def test_a_stream_that_cannot_begin_leaves_nothing_behind(tmp_path: Path) -> None:
    with LLM(toy_model(tmp_path, max_slots=1), engine_config=EngineConfig(max_queue=0)) as llm:
        with pytest.raises(QueueFullError):
            next(iter(llm.stream("prompt", SamplingParams(n=2))))
        assert not llm.engine.has_work


@pytest.mark.long
def test_a_stream_that_is_collected_within_a_step_ends_after_it(tmp_path: Path) -> None:
    """The collector may run inside a step, with the lock held; closing the stream must not wait for it."""
    model = toy_model(tmp_path)
    assert isinstance(model.runner, NullRunner)
    with lasting_objects(), LLM(model) as llm:  # so that a collection looks at few objects
        forgotten: list[object] = [llm.stream("prompt", GREEDY)]
        forgotten.append(forgotten)
        next(iter(forgotten[0]))  # type: ignore[call-overload]
        del forgotten

        def collect(_: object) -> None:
            gc.collect()

        model.runner.before_forward = collect
        llm.generate("other", GREEDY)
        stats = llm.stats()
        assert (stats.running, stats.cancelled, stats.finished) == (0, 1, 1)


def test_ctrl_c_waits_for_the_end_of_a_step(tmp_path: Path) -> None:
    model = toy_model(tmp_path)
    assert isinstance(model.runner, NullRunner)
    begin = list(range(100))
    prompts = [[*begin, n] for n in range(3)]
    with LLM(model) as llm:
        expected = [llm.generate(prompt, GREEDY)[0].outputs[0] for prompt in prompts]
        llm.engine.clear_prefix_cache()
        llm.generate([*begin, 9], GREEDY)
        copy_prefix = model.runner.copy_prefix

        def interrupted(source: int, target: int, length: int) -> None:
            signal.raise_signal(signal.SIGINT)
            copy_prefix(source, target, length)

        model.runner.copy_prefix = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY)
        assert not llm.engine.has_work
        llm.engine.check_integrity()
        model.runner.copy_prefix = copy_prefix  # type: ignore[method-assign]
        assert [output.outputs[0] for output in llm.generate(prompts, GREEDY)] == expected


def test_the_end_token_ends_it_and_is_not_in_the_text(tmp_path: Path) -> None:
    first = tokens(LLM(toy_model(tmp_path)).generate("p", GREEDY))[0]
    end = first[6]
    llm = LLM(toy_model(tmp_path, end_token_ids={end}))
    stop_at = first.index(end)
    (output,) = llm.generate("p", GREEDY)
    completion = output.outputs[0]
    assert completion.token_ids == first[: stop_at + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", end)
    assert completion.text == llm.decode(first[:stop_at])
    assert tokens(llm.generate("p", greedy(ignore_eos=True)))[0] == first
    later = tokens(llm.generate("p", greedy(min_tokens=stop_at + 1)))[0]
    assert len(later) > stop_at + 1
    assert end not in later[: stop_at + 1]


def test_a_cleared_prefix_cache_holds_nothing(llm: LLM) -> None:
    def cached() -> int:
        (output,) = llm.generate([list(range(40))], SamplingParams(max_tokens=1))
        assert output.metrics is not None
        return output.metrics.cached_tokens

    cached()
    assert cached() > 0
    llm.clear_prefix_cache()
    assert cached() == 0


def test_stop_token_ids_and_keeping_them_in_the_text(llm: LLM) -> None:
    first = tokens(llm.generate("p", GREEDY))[0]
    stop = first[4]
    at = first.index(stop)
    (output,) = llm.generate("p", greedy(stop_token_ids=[stop]))
    assert (output.outputs[0].token_ids, output.outputs[0].stop_reason) == (first[: at + 1], stop)
    assert output.outputs[0].text == llm.decode(first[:at])
    (output,) = llm.generate("p", greedy(stop_token_ids=[stop], include_stop_str_in_output=True))
    assert output.outputs[0].text == llm.decode(first[: at + 1])


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    text = llm.generate("p", GREEDY)[0].outputs[0].text
    stop = text[5:8]
    (output,) = llm.generate("p", greedy(stop=[stop]))
    completion = output.outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    (output,) = llm.generate("p", greedy(stop=[stop], include_stop_str_in_output=True))
    assert output.outputs[0].text == text[: text.index(stop) + len(stop)]
    (output,) = llm.generate("p", greedy(stop=["never there"]))
    assert output.outputs[0].text == text


def test_logprobs_hold_the_chosen_token_with_its_text(llm: LLM) -> None:
    (output,) = llm.generate("p", greedy(logprobs=3))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    for choices, token in zip(completion.logprobs, completion.token_ids, strict=True):
        assert len(choices) == 3
        assert choices[token].rank == 1
        assert choices[token].text == llm.tokenizer.decode([token], skip_special_tokens=False)
    total = sum(c[t].logprob for c, t in zip(completion.logprobs, completion.token_ids, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert llm.generate("p", GREEDY)[0].outputs[0].logprobs is None


def test_max_tokens_is_clipped_to_the_context_and_longer_prompts_are_refused(tmp_path: Path) -> None:
    llm = LLM(toy_model(tmp_path, context_length=16))
    assert llm.context_length == 16
    (output,) = llm.generate([65] * 10, greedy(max_tokens=100))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (6, "length")
    with pytest.raises(PromptTooLongError, match="16 tokens > 15 maximum: the context holds 16"):
        llm.generate([[1], [65] * 16], GREEDY)
    assert llm.stats().running + llm.stats().waiting == 0
    assert len(tokens(llm.generate([1], GREEDY))[0]) == 15


def test_defaults_come_from_the_checkpoint(tmp_path: Path) -> None:
    llm = LLM(toy_model(tmp_path, end_token_ids=()))
    assert len(tokens(llm.generate("p"))[0]) == 16
    llm = LLM(toy_model(tmp_path, end_token_ids=(), sampling={"temperature": 0.0, "max_tokens": 3}))
    assert tokens(llm.generate("p")) == tokens(llm.generate("p", greedy(max_tokens=3)))
    assert [state.outputs[0].token_ids for state in llm.stream("p")][-1] == tokens(llm.generate("p"))[0]


def test_chat_renders_one_or_many_conversations(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    two = [*one, {"role": "assistant", "content": "ho"}]
    outputs = llm.chat([one, two], GREEDY)
    assert [llm.decode(output.prompt_token_ids) for output in outputs] == [
        "[user]hi",
        "[user]hi[assistant]ho",
    ]
    assert outputs[0].prompt_token_ids.count(256) == 1  # the <s> of the template; the tokenizer adds none
    assert tokens(llm.chat(one, GREEDY)) == tokens(outputs)[:1]
    (with_tools,) = llm.chat(one, GREEDY, tools=[{"name": "f"}])
    assert "'name': 'f'" in llm.decode(with_tools.prompt_token_ids)
    (other,) = llm.chat(one, GREEDY, chat_template="{{ messages[0].content }}!")
    assert llm.decode(other.prompt_token_ids) == "hi!"
    (unlimited,) = llm.chat(one)
    assert len(unlimited.outputs[0].token_ids) > 16 or unlimited.outputs[0].finish_reason == "stop"


def test_without_a_tokenizer_tokens_still_work(tmp_path: Path) -> None:
    llm = LLM(toy_model(tmp_path, tokenizer=False))
    (output,) = llm.generate([1, 2, 3], GREEDY)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 20)
    for call in (lambda: llm.generate("text"), lambda: llm.encode("text"), lambda: llm.tokenizer):
        with pytest.raises(UsageError, match=r"toy has no tokenizer.json: add the file, or pass"):
            call()
    with pytest.raises(InvalidSamplingError, match="stop strings need a tokenizer"):
        llm.generate([1], greedy(stop=["x"]))


def test_a_device_failure_is_in_the_result_of_its_request_only(tmp_path: Path) -> None:
    model = toy_model(tmp_path)
    assert isinstance(model.runner, NullRunner)

    def fail(rows: object) -> None:
        if any(row.tokens[0] == 7 for row in rows):  # type: ignore[attr-defined]
            raise ProviderRuntimeError("out of memory")

    model.runner.before_forward = fail
    with pytest.warns(CarryallWarning, match="the request of prompt 1 failed"):
        good, bad = LLM(model).generate([[1, 2], [7, 8]], greedy(max_tokens=1))
    assert good.error is None
    assert (bad.error, bad.outputs[0].finish_reason, bad.finished) == ("out of memory", "error", True)


def test_closed_llm_says_so(llm: LLM) -> None:
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError, match="is closed"):
        llm.generate("p", GREEDY)


def test_closing_ends_another_thread_s_requests(tmp_path: Path) -> None:
    llm = LLM(toy_model(tmp_path, context_length=4000, step_seconds=0.001))
    errors: list[Exception] = []
    running = threading.Event()

    def work() -> None:
        try:
            for _ in llm.stream("p", greedy(max_tokens=3000)):
                running.set()
        except EngineClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert running.wait(60)
    llm.close()
    thread.join(60)
    assert len(errors) == 1


@pytest.mark.long
def test_threads_share_the_batch_and_get_their_own_results(tmp_path: Path) -> None:
    llm = LLM(toy_model(tmp_path, step_seconds=0.01))
    prompts = [f"thread {i}" for i in range(6)]
    expected = [tokens(llm.generate(prompt, GREEDY))[0] for prompt in prompts]
    before = llm.stats().steps
    results: dict[int, list[int]] = {}
    barrier = threading.Barrier(6, timeout=60)

    def work(i: int) -> None:
        barrier.wait()
        if i % 2:
            results[i] = tokens(llm.generate(prompts[i], GREEDY))[0]
        else:
            results[i] = list(llm.stream(prompts[i], GREEDY))[-1].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results[i] for i in range(6)] == expected
    assert llm.stats().steps - before < 6 * 20


def test_bad_words_are_texts_or_tokens(llm: LLM, tmp_path: Path) -> None:
    (plain,) = llm.generate("hello", GREEDY)
    first, second = plain.outputs[0].token_ids[:2]
    words = [llm.decode([first]), [first, second]]
    (output,) = llm.generate("hello", greedy(bad_words=words))
    assert first not in output.outputs[0].token_ids
    with LLM(toy_model(tmp_path, tokenizer=False)) as bare:
        assert second not in tokens(bare.generate([1, 2], greedy(bad_words=[[second]])))[0]
        with pytest.raises(InvalidSamplingError, match="bad words as text need a tokenizer"):
            bare.generate([1, 2], greedy(bad_words=["a"]))


def test_dry_does_not_reach_over_its_sequence_breakers(llm: LLM) -> None:
    prompt = "abc:abc:abc:"
    a = llm.encode("a")[-1]
    options = {"dry_multiplier": 1e6, "dry_allowed_length": 1, "max_tokens": 1, "logit_bias": {a: 1000.0}}
    assert tokens(llm.generate(prompt, greedy(**options))) == [[a]]  # the colon before it ends every run
    other = llm.generate(prompt, greedy(**options, dry_sequence_breakers=["x"]))
    assert tokens(other) != [[a]]
