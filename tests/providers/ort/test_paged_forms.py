"""The forms to which paged steps are padded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carryall.providers.ort.paged_forms import Forms, StepSizes

BLOCK, BLOCKS, SLOTS = 16, 100, 40


@st.composite
def steps(draw: st.DrawFn) -> StepSizes:
    counts = draw(st.lists(st.one_of(st.just(1), st.integers(1, 900)), min_size=1, max_size=SLOTS))
    pasts = [draw(st.integers(0, BLOCK * BLOCKS - count)) for count in counts]
    longest = max(past + count for past, count in zip(pasts, counts, strict=True))
    return StepSizes(sum(counts), len(counts), -(-longest // BLOCK), max(counts), longest)


@given(steps())
def test_a_form_holds_its_step_and_the_padding(step: StepSizes) -> None:
    forms = Forms(BLOCK, BLOCKS, SLOTS)
    form = forms.choose(step)
    if form is None:
        assert step.query > 1
        return
    assert step.tokens <= form.tokens <= max(64, 2 * step.tokens)
    assert step.query <= form.query
    assert step.width <= form.width <= BLOCKS
    assert form.longest <= step.longest <= form.reach == form.width * BLOCK
    padding = form.tokens - step.tokens
    assert step.rows + -(-padding // form.padding) <= form.rows <= forms.most_rows
    assert form.padding <= min(form.query, form.reach)
    # Kernels take a run with as many rows as tokens for one of single tokens.
    assert (form.tokens == form.rows) if step.query == 1 else (form.tokens > form.rows)
    if step.query == 1:
        assert form.tokens - step.tokens <= form.rows - step.rows


def test_small_steps_have_forms() -> None:
    forms = Forms(BLOCK, BLOCKS, 256)
    assert [form.rows for form in Forms(BLOCK, BLOCKS, 8).smallest()] == [1, 2, 4, 8]
    for rows in range(1, 257):
        assert forms.choose(StepSizes(rows, rows, 3, 1, 40)) is not None
    for tokens in range(2, 2045):
        assert forms.choose(StepSizes(tokens, 1, BLOCKS, tokens, tokens)) is not None
    assert forms.choose(StepSizes(2049, 1, BLOCKS, 2049, 2049)) is None
    assert forms.choose(StepSizes(257, 257, 3, 1, 40)) is None


def test_there_are_few_forms() -> None:
    forms = Forms(128, 320, 32)
    chosen = {
        forms.choose(StepSizes(tokens + rows - 1, rows, -(-longest // 128), tokens, longest))
        for tokens in range(1, 2049, 13)
        for rows in range(1, 33)
        for longest in (tokens, 3000)
    }
    assert len(chosen - {None}) < 150
