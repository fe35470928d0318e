"""The number of prompt tokens that a step takes while other requests decode."""

from __future__ import annotations

import numpy as np
import pytest
from engine_kit import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.runtime.engine.kv.slots import SlotTable
from carryall.runtime.engine.requests.prompt_costs import PromptCosts
from carryall.runtime.engine.requests.prompt_images import PromptImages
from carryall.runtime.engine.sampling.sampler import Sample
from carryall.runtime.engine.schedule.scheduler import Scheduler
from carryall.runtime.process.threads import at_lower_priority

FIXED, ROW, PROMPT, TOKEN = 8e-3, 3e-3, 12e-3, 1.3e-3


def seconds(rows: int, tokens: int, prompts: int = 1) -> float:
    return (FIXED if rows else 0.0) + ROW * rows + (PROMPT * prompts + TOKEN * tokens if tokens else 0.0)


def test_nothing_is_known_before_both_were_seen() -> None:
    costs = PromptCosts()
    assert costs.prompt_tokens(1, 2.0) is None
    costs.observe(0, 1, 100, seconds(0, 100))
    assert costs.prompt_tokens(1, 2.0) is None
    costs.observe(1, 0, 0, seconds(1, 0))
    assert costs.prompt_tokens(1, 2.0) is not None


@pytest.mark.parametrize("stretch", [1.5, 2.25, 4.0])
@pytest.mark.parametrize("rows", [4, 16, 32])
def test_steps_become_as_long_as_allowed(rows: int, stretch: float) -> None:
    costs = PromptCosts()
    rng = np.random.default_rng(0)
    for _ in range(60):
        decoding, tokens, prompts = (int(rng.integers(0, most)) for most in (33, 200, 3))
        tokens *= prompts
        took = seconds(decoding, tokens, prompts) * rng.uniform(0.95, 1.05)
        costs.observe(decoding, prompts, tokens, took)
    chosen = costs.prompt_tokens(rows, stretch)
    assert chosen is not None
    ratio = seconds(rows, chosen) / seconds(rows, 0)
    smallest = seconds(rows, 4) / seconds(rows, 0)
    assert ratio == pytest.approx(max(stretch, smallest), rel=0.15)
    assert costs.seconds_per_prompt_token() == pytest.approx(TOKEN, rel=0.1)


@st.composite
def machines(draw: st.DrawFn) -> tuple[float, float, float, float]:
    """Seconds of any decode rows, a decode row, a prompt and a prompt token: from a GPU to a slow CPU."""
    fixed = 10.0 ** draw(st.floats(-4.0, -1.5))
    row = fixed * 10.0 ** draw(st.floats(-3.0, 0.0))
    prompt = fixed * draw(st.floats(0.0, 1.0))
    return fixed, row, prompt, fixed * 10.0 ** draw(st.floats(-4.0, -1.0))


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    machine=machines(),
    later=st.integers(0, 3000),
    piece=st.sampled_from([0, 4, 9, 256]),
    seed=st.integers(0, 99),
)
def test_what_prompts_cost_is_not_forgotten_in_other_steps(
    machine: tuple[float, float, float, float], later: int, piece: int, seed: int
) -> None:
    """Steps of decode rows alone, or with pieces of one length, leave what they say nothing about."""
    fixed, row, prompt, token = machine

    def took(rows: int, tokens: int, prompts: int = 1) -> float:
        return (fixed if rows else 0.0) + row * rows + (prompt * prompts + token * tokens if tokens else 0.0)

    costs = PromptCosts()
    rng = np.random.default_rng(seed)
    right = (1.25 * took(8, 0) - prompt) / token
    for _ in range(60):
        rows, prompts = int(rng.integers(0, 17)), int(rng.integers(0, 3))
        tokens = prompts * int(rng.integers(1, max(2, int(2 * right))))
        costs.observe(rows, prompts, tokens, took(rows, tokens, prompts) * rng.uniform(0.98, 1.02))
    for _ in range(later):
        costs.observe(8, int(piece > 0), piece, took(8, piece) * rng.uniform(0.98, 1.02))
    chosen = costs.prompt_tokens(8, 2.25)
    assert chosen is not None
    assert took(8, chosen) == pytest.approx(max(2.25 * took(8, 0), took(8, 4)), rel=0.15)


def test_one_long_step_changes_little() -> None:
    costs = PromptCosts()
    for tokens in (0, 30, 60) * 20:
        costs.observe(4, int(tokens > 0), tokens, seconds(4, tokens))
    before = costs.prompt_tokens(4, 4.0)
    assert before is not None
    costs.observe(4, 1, 30, 100 * seconds(4, 30))
    assert costs.prompt_tokens(4, 4.0) == pytest.approx(before, rel=0.35)
    for tokens in (0, 30, 60):
        costs.observe(4, int(tokens > 0), tokens, seconds(4, tokens))
    assert costs.prompt_tokens(4, 4.0) == pytest.approx(before, rel=0.15)


def test_a_long_prompt_after_many_decode_steps_gets_pieces_of_the_right_size() -> None:
    scheduler = Scheduler(SlotTable(8), 512, stretch=4.0)
    scheduler.add(make_request("stream", 5))
    drive(scheduler, 3)
    scheduler.add(make_request("first", 600))
    drive(scheduler, 60)
    drive(scheduler, 400)
    scheduler.add(make_request("second", 600))
    pieces = drive(scheduler, 8)
    rows = len(scheduler.running) - 1
    right = (3.0 * seconds(rows, 0) - PROMPT) / TOKEN
    assert all(size == pytest.approx(right, abs=2) for size in pieces)


def test_costs_that_change_are_followed() -> None:
    costs = PromptCosts()
    for factor in (1.0, 5.0):
        for tokens in (0, 30, 60) * 30:
            costs.observe(4, int(tokens > 0), tokens, seconds(4, 0) + factor * (seconds(0, tokens)))
    slow = costs.prompt_tokens(4, 10.0)
    assert slow == pytest.approx((9 * seconds(4, 0) / 5 - PROMPT) / TOKEN, rel=0.2)


def test_disturbed_steps_make_small_pieces() -> None:
    costs = PromptCosts()
    for tokens, took in ((0, 0.05), (10, 0.5), (400, 0.1)):
        costs.observe(4, int(tokens > 0), tokens, took)
    assert costs.prompt_tokens(4, 2.0) == 4


def drive(scheduler: Scheduler, steps: int, factor: float = 1.0) -> list[int]:
    """Run steps with ``factor`` times the seconds of the model; return the prompt tokens of each."""
    found = []
    for _ in range(steps):
        plan = scheduler.plan()
        tokens = sum(len(row.tokens) for row in plan.rows if len(row.tokens) > 1)
        rows = sum(len(row.tokens) == 1 for row in plan.rows)
        scheduler.learn(plan, factor * seconds(rows, tokens, len(plan.rows) - rows))
        scheduler.commit(plan)
        for row, request in zip(plan.rows, plan.requests, strict=True):
            if row.num_logits:
                request.append(Sample(1))
        found.append(tokens)
    return found


def test_steps_beside_a_tower_do_not_make_the_pieces_behind_it_larger() -> None:
    scheduler = Scheduler(SlotTable(8), 512, stretch=4.0)
    scheduler.add(make_request("stream", 5))
    drive(scheduler, 3)
    scheduler.add(make_request("first", 600))
    drive(scheduler, 60)
    at_lower_priority(lambda: drive(scheduler, 200, factor=5.0))
    scheduler.add(make_request("page", 600))
    pieces = drive(scheduler, 8)
    rows = len(scheduler.running) - 1
    right = (3.0 * seconds(rows, 0) - PROMPT) / TOKEN
    assert all(size == pytest.approx(right, abs=2) for size in pieces)


def test_a_long_prompt_is_cut_small_beside_streams_and_not_without() -> None:
    scheduler = Scheduler(SlotTable(8), 512, stretch=2.25)
    scheduler.add(make_request("stream", 5))
    drive(scheduler, 3)
    scheduler.add(make_request("long", 2000))
    pieces = drive(scheduler, 8)
    assert all(4 <= size <= 16 for size in pieces)
    scheduler.remove(scheduler.running[0])
    assert drive(scheduler, 1) == [512]


def test_a_prompt_with_a_picture_is_cut_smaller_beside_streams() -> None:
    def pieces(*, sees: bool) -> list[int]:
        scheduler = Scheduler(SlotTable(8), 512, stretch=2.25)
        for number in range(6):
            scheduler.add(make_request(f"stream {number}", 5))
        drive(scheduler, 3)
        scheduler.add(make_request("other", 600))  # what prompts cost
        drive(scheduler, 100)
        scheduler.add(page := make_request("page", 200))
        if sees:
            states = np.zeros((1, 4), np.float32)
            page.images = PromptImages.of(
                page.prompt_token_ids, [page.prompt_token_ids[1]], [(bytes(32), states)]
            )
        return drive(scheduler, 8)[1:]  # the first one is cut where it is admitted

    usual, smaller = pieces(sees=False), pieces(sees=True)
    rows = 7  # the streams, and the other request behind its prompt
    for sizes, stretch in ((usual, 2.25), (smaller, 1.75)):
        right = ((stretch - 1.0) * seconds(rows, 0) - PROMPT) / TOKEN
        assert all(size == pytest.approx(right, abs=2) for size in sizes), (sizes, right)
    assert max(smaller) < min(usual)


@pytest.mark.parametrize("streams", [0, 1, 4])
@pytest.mark.parametrize("length", [300, 1500])
def test_the_time_of_a_prompt_beside_streams_is_known_before_it_runs(streams: int, length: int) -> None:
    scheduler = Scheduler(SlotTable(8), 512, stretch=2.25)
    scheduler.add(make_request("before", 600))
    drive(scheduler, 20)
    scheduler.remove(scheduler.running[0])
    for number in range(streams):
        scheduler.add(make_request(f"stream {number}", 5))
    drive(scheduler, 20)
    expected = scheduler.seconds_of_prompt(length)
    scheduler.add(prompt := make_request("prompt", length))
    took = 0.0
    while not prompt.output_token_ids:
        (tokens,) = drive(scheduler, 1)
        took += seconds(streams, tokens)
    assert expected == pytest.approx(took, rel=0.25)


def test_a_prompt_is_not_cut_beside_requests_that_nobody_streams() -> None:
    scheduler = Scheduler(SlotTable(8), 512, stretch=2.25)
    scheduler.add(make_request("offline", 5, streamed=False))
    drive(scheduler, 3)
    scheduler.add(make_request("long", 2000))
    assert drive(scheduler, 3) == [511] * 3


def test_many_that_wait_for_a_first_token_outweigh_few_streams() -> None:
    scheduler = Scheduler(SlotTable(8), 512, stretch=2.25)
    scheduler.add(make_request("stream", 5))
    drive(scheduler, 3)
    scheduler.add(make_request("long", 400))
    alone = sum(drive(scheduler, 3))
    for number in range(20):
        scheduler.add(make_request(str(number), 400))
    among = sum(drive(scheduler, 3))
    assert among > 4 * alone


def test_a_backlog_of_prompts_may_slow_streams_more_than_a_single_prompt() -> None:
    def tokens(waiting: int) -> int:
        scheduler = Scheduler(SlotTable(8), 512, stretch=2.25)
        for number in range(5):
            scheduler.add(make_request(f"stream {number}", 5))
        drive(scheduler, 3)
        scheduler.add(make_request("first", 2000))
        drive(scheduler, 3)  # learns what prompts cost
        for number in range(waiting - 1):
            scheduler.add(make_request(str(number), 2000))
        return sum(drive(scheduler, 4))

    one, two, three = (tokens(waiting) for waiting in (1, 2, 3))
    assert two == one  # 1 of 7 requests waits beside another
    assert three > 1.3 * one


@pytest.mark.parametrize("per_token", [5e-324, 1e-310, 1e-30])
def test_a_token_that_seems_to_cost_nothing_sets_no_limit(
    per_token: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = PromptCosts()
    costs.observe(1, 0, 0, 1e-3)
    costs.observe(0, 1, 64, 1e-3)
    monkeypatch.setattr(PromptCosts, "_solve", lambda self: [1e-3, 0.0, 0.0, per_token])
    assert costs.prompt_tokens(1, 2.0) == 2**31


def test_a_cost_that_is_lost_in_noise_is_not_told() -> None:
    """Who waits for a store as long as computing takes must not wait 0 s."""
    costs = PromptCosts()
    costs.observe(1, 0, 0, 5e-3)
    for tokens, took in ((2, 0.05), (200, 0.02), (2, 0.06), (300, 0.03)):
        costs.observe(0, 1, tokens, took)
    assert costs.seconds_per_prompt_token() is None
    assert costs.seconds_of_prompts(64) is None
