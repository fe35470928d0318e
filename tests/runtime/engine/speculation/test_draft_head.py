"""The draft head on the test double: which hidden states it reads, slots, pauses and faults."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from engine_kit import GREEDY, alone, make_engine, make_request, make_runner, run
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import Row
from carryall.providers.targets.null import NullRunner
from carryall.runtime.engine.sampling.sampler import Sample
from carryall.runtime.engine.speculation.draft_head import DraftHead


class Recorder(NullRunner):
    """A head's runner that records its rows."""

    rows: list[Row]
    fails = False

    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        """Record the rows and run them."""
        if self.fails:
            raise ProviderRuntimeError("broken")
        self.rows += rows
        return super().forward(rows)


def make_head(max_slots: int = 4, max_tokens: int = 3) -> tuple[DraftHead, Recorder]:
    runner = make_runner(max_slots=max_slots)
    runner.__class__ = Recorder
    assert isinstance(runner, Recorder)
    runner.rows = []
    return DraftHead(runner, max_tokens), runner


def states(start: int, stop: int) -> npt.NDArray[np.float32]:
    """Hidden states that tell their positions."""
    return np.repeat(np.arange(start, stop, dtype=np.float32)[:, None], 4, axis=1)


def test_a_state_is_read_with_the_token_behind_it() -> None:
    head, runner = make_head()
    request = make_request("a", [10, 11, 12, 13])
    assert head.evidence(request) is None
    head.observe(request, 0, states(0, 4))
    assert head.evidence(request) is None  # the token behind the last state is not known yet
    request.append(Sample(14))
    assert head.evidence(request) == 0
    assert len(head.propose([(request, 3)])[0]) == 3
    first, *others = runner.rows
    assert (first.start, first.tokens.tolist()) == (0, [11, 12, 13, 14])
    assert first.hidden_states is not None
    assert first.hidden_states[:, 0].tolist() == [0, 1, 2, 3]
    assert [row.start for row in others] == [4, 5]  # on its own states
    head.observe(request, 4, states(4, 6))  # two tokens were accepted
    for token in (15, 16):
        request.append(Sample(token))
    assert head.evidence(request) == 0
    head.propose([(request, 1)])
    assert (runner.rows[-1].start, runner.rows[-1].tokens.tolist()) == (4, [15, 16])


def test_a_gap_and_a_long_prompt_begin_anew() -> None:
    head, runner = make_head()
    request = make_request("a", list(range(200)))
    assert not head.wants_states(request, 100)
    assert head.wants_states(request, 200)
    head.observe(request, 0, states(0, 200))
    request.append(Sample(7))
    head.propose([(request, 1)])
    assert len(runner.rows[-1].tokens) == 64
    for token in (8, 9):
        request.append(Sample(token))
    head.observe(request, 202, states(202, 203))  # nothing was observed in between
    request.append(Sample(10))
    head.propose([(request, 1)])
    assert (runner.rows[-1].start, runner.rows[-1].tokens.tolist()) == (0, [10])


def test_a_broken_head_is_disabled_and_slots_are_reused() -> None:
    head, runner = make_head(max_slots=1)
    requests = [make_request(name, [1, 2, 3]) for name in "ab"]
    for request in requests:
        head.observe(request, 0, states(0, 3))
        request.append(Sample(4))
    assert head.evidence(requests[0]) is None  # its slot was taken
    runner.fails = True
    assert [len(tokens) for tokens in head.propose([(requests[1], 2)])] == [0]
    assert head.evidence(requests[1]) is None
    assert not head.wants_states(requests[1], 4)
    head.forget(requests[1])
    head.close()
    assert runner.closed


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(
    prompts=st.lists(st.lists(st.integers(0, 250), min_size=1, max_size=90), min_size=1, max_size=6),
    max_slots=st.integers(1, 3),
    adaptive=st.booleans(),
    kv_tokens=st.sampled_from([None, 150]),
)
def test_tokens_are_those_without_a_head(
    prompts: list[list[int]], max_slots: int, adaptive: bool, kv_tokens: int | None
) -> None:
    head, _ = make_head(max_slots)
    engine, _ = make_engine(
        max_slots=max_slots, proposer=head, adaptive=adaptive, kv_tokens=kv_tokens, prefix_cache=True
    )
    requests = [make_request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    run(engine, requests)
    for request in requests:
        assert request.output_token_ids == alone(request)
    engine.check_integrity()
    assert adaptive or engine.stats().proposed_tokens > 0
