"""Requests with a common prefix compute it once, and give the same tokens as alone."""

from __future__ import annotations

from engine_kit import GREEDY, alone, make_engine, make_request, run

from carryall.errors import ProviderRuntimeError
from carryall.providers.targets.null import NullRunner
from carryall.runtime.engine.kv.slots import Copy
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.types.sampling_params import SamplingParams

SYSTEM = list(range(40))
ONE = SamplingParams(temperature=0.0, max_tokens=1)


def ask(name: str, *question: int, params: SamplingParams = GREEDY, salt: str | None = None) -> Request:
    return make_request(name, SYSTEM + list(question), params, cache_salt=salt)


def recorded_copies(runner: NullRunner) -> list[Copy]:
    copies = []
    copy_prefix = runner.copy_prefix

    def recording(source: int, target: int, length: int) -> None:
        copies.append(Copy(source, target, length))
        copy_prefix(source, target, length)

    runner.copy_prefix = recording  # type: ignore[method-assign]
    return copies


def test_hit_equals_miss() -> None:
    engine, _ = make_engine(prefix_cache=True)
    for name, question in (("a", (50, 51)), ("b", (60,)), ("c", (50, 51)), ("d", (50, 52))):
        request = ask(name, *question)
        assert run(engine, [request]) == [alone(request)]
        assert request.metrics.cached_tokens == {"a": 0, "b": 40, "c": 41, "d": 41}[name]
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prefix_cached_tokens) == (4, 3, 122)
    assert stats.computed_tokens == stats.prompt_tokens + stats.generated_tokens - 4 - 122


def test_a_conversation_goes_on_in_the_slot_it_left() -> None:
    engine, runner = make_engine(prefix_cache=True)
    copies = recorded_copies(runner)
    first = ask("first", 50)
    run(engine, [first])
    second = ask("second", 50, *first.output_token_ids, 99, 98)
    assert run(engine, [second]) == [alone(second)]
    assert second.metrics.cached_tokens == 41 + len(first.output_token_ids) - 1
    assert copies == []
    assert engine.stats().idle_kv_tokens == second.num_computed


def test_a_long_answer_that_was_rewritten_does_not_cost_another_text_its_slot() -> None:
    engine, _ = make_engine(prefix_cache=True, max_slots=2)
    other = make_request("other", list(range(100, 130)))
    run(engine, [other])
    prompt = [*SYSTEM, 50]
    for turn in range(3):  # each answer is more than a tenth of its slot's tokens
        request = make_request(str(turn), prompt)
        assert run(engine, [request]) == [alone(request)]
        assert not turn or request.metrics.cached_tokens == len(prompt) - 2
        prompt = [*prompt, 60 + turn, 70 + turn]
    again = make_request("again", list(range(100, 130)))
    assert run(engine, [again]) == [alone(again)]
    assert again.metrics.cached_tokens == 29


def test_a_tail_of_a_prompt_is_kept_while_there_is_a_free_slot() -> None:
    for max_slots, cached in ((2, 44), (1, 41)):
        engine, _ = make_engine(prefix_cache=True, max_slots=max_slots)
        texts = [[*SYSTEM, 80, *tail] for tail in ((50, 51, 52, 53), (60, 61, 62, 63))]
        for text in texts:
            run(engine, [make_request(str(text), text, ONE)])
        again = make_request("again", texts[0], ONE)
        assert run(engine, [again]) == [alone(again)]
        assert again.metrics.cached_tokens == cached


def test_a_running_request_s_prompt_is_copied_once_it_is_computed() -> None:
    engine, runner = make_engine(prefix_cache=True, max_step_tokens=20)
    copies = recorded_copies(runner)
    requests = [ask(name, 50 + i) for i, name in enumerate("abc")]
    assert run(engine, requests) == [alone(request) for request in requests]
    assert [copy.length for copy in copies] == [40, 40]
    assert [request.metrics.cached_tokens for request in requests] == [0, 40, 40]


def test_salts_keep_tenants_apart() -> None:
    engine, _ = make_engine(prefix_cache=True)
    requests = [ask("a", 50, salt="x"), ask("b", 50, salt="y"), ask("c", 50, salt="x")]
    for request in requests:
        assert run(engine, [request]) == [alone(request)]
    assert [request.metrics.cached_tokens for request in requests] == [0, 0, 40]


def test_least_recently_used_slots_give_way_first() -> None:
    engine, _ = make_engine(prefix_cache=True, max_slots=2)
    a, b = make_request("a", 20, ONE), make_request("b", 20, ONE)
    run(engine, [a])
    run(engine, [b])
    run(engine, [make_request("a2", a.prompt_token_ids, ONE)])
    run(engine, [make_request("new", 20, ONE)])
    again = [make_request(n, r.prompt_token_ids, ONE) for n, r in (("a3", a), ("b3", b))]
    run(engine, again)
    assert [request.metrics.cached_tokens for request in again] == [19, 0]


def test_the_byte_budget_counts_idle_slots_and_evicts_them() -> None:
    engine, runner = make_engine(prefix_cache=True, kv_tokens=60)
    run(engine, [make_request("a", 30, ONE), make_request("b", 25, ONE)])
    assert engine.stats().idle_kv_tokens == runner.held_tokens() == 55
    request = make_request("c", 10, GREEDY)
    assert run(engine, [request]) == [alone(request)]
    assert engine.stats().preemptions == 0
    assert runner.held_tokens() == engine.stats().kv_tokens <= 60


def test_a_slot_s_own_prefix_is_no_reason_to_keep_two() -> None:
    engine, _ = make_engine(prefix_cache=True)
    run(engine, [ask("a", 50, params=ONE), ask("b", 51, params=ONE)])
    assert engine.stats().idle_kv_tokens == 82
    run(engine, [ask("c", 50, 60, params=ONE), ask("d", 50, 60, 61, params=ONE)])
    assert engine.stats().idle_kv_tokens == 41 + 43


def test_cancelled_requests_leave_what_they_computed() -> None:
    engine, _ = make_engine(prefix_cache=True, max_step_tokens=16)
    engine.add(ask("a", 50))
    engine.step()
    engine.cancel("a")
    request = ask("b", 50)
    assert run(engine, [request]) == [alone(request)]
    assert request.metrics.cached_tokens == 16


def test_failed_requests_leave_nothing() -> None:
    engine, runner = make_engine(prefix_cache=True)
    failing = ask("a", 50)
    engine.add(failing)
    engine.step()

    def fail(rows: object) -> None:
        raise ProviderRuntimeError("no")

    runner.before_forward = fail
    engine.step()
    assert failing.finish_reason == "error"
    assert engine.stats().kv_tokens == runner.held_tokens() == 0


def test_a_failed_copy_is_made_good_by_computing() -> None:
    engine, runner = make_engine(prefix_cache=True)
    run(engine, [ask("a", 50)])

    def copy_prefix(source: int, target: int, length: int) -> None:
        raise ProviderRuntimeError("no")

    good, runner.copy_prefix = runner.copy_prefix, copy_prefix  # type: ignore[method-assign]
    requests = [ask("b", 60), ask("c", 61)]
    for request in requests:
        engine.add(request)
    engine.step()
    engine.check_integrity()
    runner.copy_prefix = good  # type: ignore[method-assign]
    run(engine)
    assert [request.output_token_ids for request in requests] == [alone(request) for request in requests]


def test_the_target_of_a_failed_copy_is_not_copied_again() -> None:
    engine, runner = make_engine(prefix_cache=True)
    run(engine, [ask("a", 50)])
    copies, copy_prefix = [], runner.copy_prefix

    def cut_off(source: int, target: int, length: int) -> None:
        copies.append((source, target))
        copy_prefix(source, target, length)
        if len(copies) == 1:
            runner.hashes[target] = [0] * length
            raise ProviderRuntimeError("no")

    runner.copy_prefix = cut_off  # type: ignore[method-assign]
    requests = [ask("b", 60), ask("c", 61)]
    assert run(engine, requests) == [alone(request) for request in requests]
    assert copies[0] == (0, 1)


def test_the_longest_prefix_is_admitted_first_but_no_request_starves() -> None:
    engine, _ = make_engine(prefix_cache=True, max_slots=1)
    run(engine, [ask("warm", 50, params=ONE)])
    stranger = make_request("stranger", 20, ONE)
    regulars = [ask(str(i), 50, 60 + i, params=ONE) for i in range(30)]
    for request in (stranger, *regulars):
        engine.add(request)
    order = []
    while engine.has_work:
        order += [request.request_id for request in engine.step()]
    assert order.index("stranger") == 16


def test_clearing_gives_the_memory_back() -> None:
    engine, runner = make_engine(prefix_cache=True)
    run(engine, [ask("a", 50)])
    released: list[int] = []
    runner.release = released.append  # type: ignore[assignment, method-assign]
    engine.clear_prefix_cache()
    assert released == [0]
    assert engine.stats().kv_tokens == 0
