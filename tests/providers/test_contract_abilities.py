"""The optional abilities of runners, checked on each available provider that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from contract_kit import CONTEXT, LOWERED, VOCAB, Logits, Tokens, close_to, sequence, whole, window_bytes

from carryall.errors import ProviderRuntimeError
from carryall.exporter.package import Package
from carryall.providers.base import (
    BestLogits,
    KVEviction,
    Provider,
    Row,
    Runner,
)

Open = Callable[..., Runner]
# Options that give the toy model all abilities.
TOY: dict[str, object] = {
    "vocab_size": VOCAB,
    "top_logits": 8,
    "embedding_size": 4,
    "sliding_window": 5,
    "trim_step": 256,
}


@pytest.fixture
def options(provider: Provider) -> dict[str, object]:
    return dict(TOY) if provider.name == "null" else {}


def test_kv_can_leave_and_come_back(open_runner: Callable[..., Runner]) -> None:
    runner, tokens = open_runner(context_length=160), np.resize(sequence(CONTEXT, 3), 150)
    if not runner.info.kv_layout:
        pytest.skip("this provider's KV cannot leave its device")
    expected = whole(runner, tokens)
    runner.forward([Row(0, tokens[:140], 0)])
    pieces = [(start, length, runner.read_kv(0, start, length)) for start, length in ((0, 64), (64, 70))]
    kept = [(start, length, [part.copy() for part in parts]) for start, length, parts in pieces]
    with pytest.raises(ProviderRuntimeError):
        runner.read_kv(0, 128, 13)
    runner.release(0)
    for start, length, parts in kept:
        runner.write_kv(2, start, length, parts)
    close_to(runner.forward([Row(2, tokens[134:], 134, num_logits=16)])[0], expected[134:])
    with pytest.raises(ProviderRuntimeError):
        runner.write_kv(3, 64, 70, kept[1][2])


def test_the_best_logits_are_those_of_all(open_runner: Open, options: dict[str, object]) -> None:
    runner, texts = open_runner(options=options), [sequence(6, 1), sequence(9, 2), sequence(5, 3)]
    if not runner.info.top_logits:
        pytest.skip("this runner gives out all logits at once")
    expected = [whole(runner, text)[-1] for text in texts]
    for slot, text in enumerate(texts):
        runner.forward([Row(slot, text[:-1], 0, 0)])
    rows = [Row(slot, text[-1:], len(text) - 1, best_suffice=slot != 1) for slot, text in enumerate(texts)]
    found = runner.forward_best(rows)
    close_to(cast(Logits, found[1])[0], expected[1])
    for slot in (0, 2):
        best, logits = cast(BestLogits, found[slot]), expected[slot]
        count = runner.info.top_logits
        np.testing.assert_array_equal(best.token_ids, np.argsort(-logits, kind="stable")[:count])
        close_to(best.logits, logits[best.token_ids])
        assert best.logsumexp == pytest.approx(np.log(np.exp(logits.astype(np.float64)).sum()), abs=1e-3)
        assert best.vocab_size == VOCAB
        close_to(best.whole(), logits)


def test_hidden_states_of_pieces_and_neighbours_are_those_of_the_whole(
    open_runner: Open, options: dict[str, object]
) -> None:
    runner, tokens = open_runner(options=options), sequence(12, 5)
    size = runner.info.embedding_size
    if not size:
        pytest.skip("this runner has no hidden states")

    def states(slot: int, start: int, stop: int, *others: Row) -> Logits:
        filled = np.full((stop - start, size), np.nan, np.float32)
        runner.forward([*others, Row(slot, tokens[start:stop], start, 0, last_hidden_states=filled)])
        return filled

    expected = states(0, 0, 12)
    assert expected.std() > 0
    pieces = [
        states(2, 0, 5),
        states(2, 5, 6, Row(1, sequence(3, 6), 0)),
        states(2, 6, 12, Row(1, sequence(1, 7), 3)),
    ]
    close_to(np.concatenate(pieces), expected)


@pytest.mark.parametrize("package", ["mistral"], indirect=True)
def test_kv_behind_windows_can_go(open_runner: Open, options: dict[str, object], package: Package) -> None:
    runner = open_runner(context_length=LOWERED, options=options)
    step, tokens = runner.info.trim_step, np.resize(sequence(CONTEXT, 3), 600)
    if not step:
        pytest.skip("this runner keeps what lies behind windows")
    assert runner.info.sliding_window == 5
    expected = whole(runner, tokens)
    runner.forward([Row(0, tokens[:590], 0, 0)])
    held = runner.kv_bytes
    runner.trim(0, 512)
    given_back = (512 + 1 - 5) // step * step * window_bytes(runner.info)
    assert held - runner.kv_bytes >= given_back > 0
    runner.copy_prefix(0, 1, 520)
    close_to(runner.forward([Row(1, tokens[520:], 520, 80)])[0], expected[520:])
    close_to(runner.forward([Row(0, tokens[590:], 590, 10)])[0], expected[590:])
    close_to(runner.forward([Row(0, tokens[512:530], 512, 18)])[0], expected[512:530])
    close_to(continued_elsewhere(runner, tokens), expected[526:])
    for slot in (0, 1):
        for fault in (
            lambda slot: runner.forward([Row(slot, tokens[511:513], 511)]),
            lambda slot: runner.copy_prefix(slot, 2, 511),
            lambda slot: runner.read_kv(slot, 448, 64),
            lambda slot: runner.write_kv(slot, 448, 64, []),
        ):
            with pytest.raises(ProviderRuntimeError):
                fault(slot)
    for slot in (0, 1, 3):
        runner.release(slot)
    assert runner.kv_bytes == 0
    close_to(whole(runner, tokens[:20]), expected[:20])


def continued_elsewhere(runner: Runner, tokens: Tokens) -> Logits:
    """Return the logits from token 526 on, in a slot that received slot 0's newest KV as from a tier."""
    runner.copy_prefix(0, 3, 512)
    parts = [part.copy() for part in runner.read_kv(0, 512, 14)]
    runner.write_kv(3, 512, 14, parts)
    return runner.forward([Row(3, tokens[526:], 526, 74)])[0]


@pytest.mark.long
def test_kv_that_stays_after_eviction_is_unchanged(open_runner: Open) -> None:
    """Without rows to evict nothing changes; otherwise the slot shrinks and can be moved as a whole."""
    runner, tokens = open_runner(context_length=160), np.resize(sequence(CONTEXT, 8), 150)
    if not runner.info.evicts_kv:
        pytest.skip("this runner cannot drop single tokens")
    expected = whole(runner, tokens)
    runner.forward([Row(0, tokens[:140], 0, 0)])
    runner.copy_prefix(0, 1, 140)
    runner.evict_kv(1, 140, KVEviction(140, 4, 100))
    close_to(runner.forward([Row(1, tokens[140:], 140, 10)])[0], expected[140:])
    close_to(runner.forward([Row(0, tokens[140:], 140, 10)])[0], expected[140:])
    runner.release(0)
    held = runner.kv_bytes
    runner.evict_kv(1, 150, KVEviction(40, 4, 20))
    assert runner.kv_bytes < held / 2
    runner.copy_prefix(1, 2, 150)
    rows = [Row(slot, tokens[:3], 150, 3) for slot in (1, 2)]
    left, right = (logits.copy() for logits in runner.forward(rows))
    close_to(left, right)


@pytest.mark.long
def test_evicted_kv_is_never_cut_back(open_runner: Open) -> None:
    runner, tokens = open_runner(), sequence(52, 9)
    if not runner.info.evicts_kv:
        pytest.skip("this runner cannot drop single tokens")
    runner.forward([Row(0, tokens[:50], 0)])
    runner.evict_kv(0, 50, KVEviction(20, 4, 10))
    for fault in (
        lambda: runner.forward([Row(0, tokens[:1], 20)]),
        lambda: runner.copy_prefix(0, 1, 20),
        lambda: runner.evict_kv(0, 52, KVEviction(23, 4, 10)),
        lambda: runner.read_kv(0, 0, 10),
        lambda: runner.write_kv(0, 0, 10, []),
    ):
        with pytest.raises(ProviderRuntimeError):
            fault()
    runner.release(0)
    runner.forward([Row(0, tokens[:1], 0)])
