"""A second toy model drafts; it follows requests through acceptance, rejection, slots and failures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from engine_kit import VOCAB, alone, make_engine, make_request, make_runner, run

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import Row
from carryall.providers.targets.null import NullRunner
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.speculation.draft_model import DraftModel
from carryall.runtime.types.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
RANDOM = SamplingParams(max_tokens=20, seed=5, top_k=30)


class Erring(NullRunner):
    """The toy model, with wrong logits after some of the tokens."""

    def __init__(self, mistaken: int) -> None:
        self.__dict__.update(make_runner().__dict__)
        self._mistaken = mistaken

    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        logits = super().forward(rows)
        for row, out in zip(rows, logits, strict=True):
            if row.tokens[-1] % 8 < self._mistaken:
                out *= -1
        return logits


def requests(count: int = 6) -> list[Request]:
    return [make_request(f"r{i}", 1 + 7 * i, (GREEDY, RANDOM)[i % 2]) for i in range(count)]


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("kv_tokens", [None, 70])
@pytest.mark.parametrize("params", [GREEDY, RANDOM])
def test_an_identical_draft_model_is_always_accepted(
    slots: int, kv_tokens: int | None, params: SamplingParams
) -> None:
    draft = make_runner()
    engine, _ = make_engine(max_slots=slots, kv_tokens=kv_tokens, proposer=DraftModel(draft, max_tokens=4))
    mine = [make_request(f"r{i}", 3 + 7 * i, params) for i in range(6)]
    assert run(engine, mine) == [alone(request) for request in mine]
    stats = engine.stats()
    assert stats.acceptance_rate > 0.9
    assert stats.proposed_tokens > 60
    assert draft.held_tokens() == 0


@pytest.mark.parametrize("mistaken", [1, 2])
def test_a_draft_catches_up_after_a_rejection(mistaken: int) -> None:
    engine, _ = make_engine(proposer=DraftModel(Erring(mistaken)))
    mine = requests()
    assert run(engine, mine) == [alone(request) for request in mine]
    assert 0.2 < engine.stats().acceptance_rate < 0.95


def test_requests_share_fewer_slots() -> None:
    draft = make_runner(max_slots=2)
    engine, _ = make_engine(max_slots=2, proposer=DraftModel(draft, max_tokens=3))
    mine = requests(9)
    assert run(engine, mine) == [alone(request) for request in mine]
    proposer = DraftModel(make_runner(max_slots=1), max_tokens=3)
    first, second = make_request("a", 4), make_request("b", 4)
    for request in (first, second, first, second):
        assert proposer.propose([(request, 3)])[0].tolist() == alone(request)[:3]


def test_long_prompts_are_read_in_pieces_first() -> None:
    draft = make_runner()
    proposer = DraftModel(draft, max_tokens=2, max_step_tokens=10)
    request = make_request("a", 25)
    lengths = [len(proposer.propose([(request, 2)])[0]) for _ in range(4)]
    assert lengths == [0, 0, 0, 2]
    assert proposer.propose([(request, 2)])[0].tolist() == alone(request)[:2]


def test_nothing_is_proposed_beyond_the_draft_s_context_or_vocabulary() -> None:
    proposer = DraftModel(make_runner(context_length=20), max_tokens=4)
    assert proposer.evidence(make_request("a", 16)) == 0
    assert proposer.evidence(make_request("b", 17)) is None
    assert proposer.evidence(make_request("c", [1, VOCAB])) is None


def test_a_draft_that_fails_is_left_aside() -> None:
    draft = make_runner()

    def fail(rows: Sequence[Row]) -> None:
        if draft.forwards > 4:
            raise ProviderRuntimeError("gone")

    draft.before_forward = fail
    engine, _ = make_engine(proposer=DraftModel(draft))
    mine = requests()
    assert run(engine, mine) == [alone(request) for request in mine]
    assert draft.forwards == 5
    engine.close()
    assert draft.closed
