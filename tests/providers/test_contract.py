"""The contract of providers and runners, checked on each provider that is available here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from contract_kit import CONTEXT, SLOTS, VOCAB, close_to, sequence, whole

from carryall.errors import CarryallError, ProviderRuntimeError, UsageError
from carryall.providers.base import Provider, Row, Runner


@pytest.mark.long
def test_info_describes_the_model(open_runner: Callable[..., Runner]) -> None:
    info = open_runner().info
    assert (info.vocab_size, info.context_length, info.max_slots) == (VOCAB, CONTEXT, SLOTS)
    assert info.kv_bytes_per_token > 0


@pytest.mark.long
def test_kv_takes_memory_until_it_is_released(open_runner: Callable[..., Runner]) -> None:
    runner = open_runner()
    empty = runner.kv_bytes
    runner.forward([Row(0, sequence(9, 0), 0)])
    held = runner.kv_bytes
    assert held >= 9 * runner.info.kv_bytes_per_token
    runner.forward([Row(1, sequence(5, 1), 0)])
    assert runner.kv_bytes >= held
    runner.release(0)
    runner.release(1)
    assert runner.kv_bytes == empty


@pytest.mark.long
def test_chunked_equals_whole(open_runner: Callable[..., Runner]) -> None:
    runner, tokens = open_runner(), sequence(13, 0)
    expected = whole(runner, tokens)
    runner.forward([Row(1, tokens[:5], 0, num_logits=0)])
    close_to(runner.forward([Row(1, tokens[5:12], 5, num_logits=7)])[0], expected[5:12])
    close_to(runner.forward([Row(1, tokens[12:], 12)])[0], expected[12:])


@pytest.mark.long
def test_batched_equals_single(open_runner: Callable[..., Runner]) -> None:
    runner = open_runner()
    texts = [sequence(length, length) for length in (4, 9, 2, 20)]
    expected = [whole(runner, text) for text in texts]
    runner.forward([Row(slot, text[:-1], 0) for slot, text in enumerate(texts)])
    rows = [Row(slot, text[-1:], len(text) - 1) for slot, text in enumerate(texts)]
    for logits, alone in zip(runner.forward(rows), expected, strict=True):
        close_to(logits, alone[-1:])


@pytest.mark.long
def test_prompts_and_decode_share_a_step(open_runner: Callable[..., Runner]) -> None:
    runner, text, prompt = open_runner(), sequence(8, 1), sequence(11, 2)
    expected, prompted = whole(runner, text), whole(runner, prompt)
    runner.forward([Row(3, text[:-1], 0)])
    late, early = runner.forward([Row(3, text[-1:], 7), Row(0, prompt, 0)])
    close_to(late, expected[-1:])
    close_to(early, prompted[-1:])


@pytest.mark.long
def test_rows_of_several_tokens_on_caches_give_all_their_logits_and_can_be_taken_back(
    open_runner: Callable[..., Runner],
) -> None:
    runner, texts = open_runner(), [sequence(9, 10), sequence(6, 11), sequence(7, 12)]
    expected = [whole(runner, text) for text in texts]
    runner.forward([Row(slot, text[:3], 0, num_logits=0) for slot, text in enumerate(texts)])
    wrong = [np.concatenate([text[3:5], (text[5:] + 1) % VOCAB]) for text in texts]
    wanted = (6, 3, 0)
    rows = [Row(slot, tail, 3, n) for slot, (tail, n) in enumerate(zip(wrong, wanted, strict=True))]
    taken = runner.forward(rows)
    assert [logits.shape for logits in taken] == [(n, VOCAB) for n in wanted]
    close_to(taken[0][:2], expected[0][3:5])
    close_to(taken[1][0], expected[1][3])
    rows = [Row(slot, text[5:], 5, num_logits=len(text) - 5) for slot, text in enumerate(texts)]
    for logits, alone in zip(runner.forward(rows), expected, strict=True):
        close_to(logits, alone[5:])


@pytest.mark.long
def test_a_prefix_can_be_copied(open_runner: Callable[..., Runner]) -> None:
    runner, tokens = open_runner(), sequence(10, 3)
    expected = whole(runner, tokens)
    runner.forward([Row(0, tokens, 0)])
    runner.copy_prefix(0, 2, 6)
    close_to(runner.forward([Row(2, tokens[6:], 6, num_logits=4)])[0], expected[6:])


@pytest.mark.long
def test_the_context_can_be_filled(open_runner: Callable[..., Runner]) -> None:
    runner, tokens = open_runner(), sequence(CONTEXT, 4)
    expected = whole(runner, tokens)
    runner.forward([Row(0, tokens[:-1], 0)])
    close_to(runner.forward([Row(0, tokens[-1:], CONTEXT - 1)])[0], expected[-1:])


@pytest.mark.long
@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Row(0, sequence(1, 0), 1), "nothing lies before it"),
        (Row(0, sequence(CONTEXT + 1, 0), 0), "longer than the context"),
        (Row(0, sequence(0, 0), 0), "no tokens"),
        (Row(SLOTS, sequence(2, 0), 0), "no such slot"),
        (Row(0, np.array([1, VOCAB]), 0), "no such token"),
        (Row(0, np.array([1, -1]), 0), "a negative token"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failing_row_harms_no_other(open_runner: Callable[..., Runner], row: Row, why: str) -> None:
    """The faulty step computes nothing; repeated without the faulty row it gives the right results."""
    runner, tokens = open_runner(), sequence(6, 5)
    expected = whole(runner, tokens)
    runner.forward([Row(1, tokens[:-1], 0)])
    with pytest.raises(ProviderRuntimeError):
        runner.forward([Row(1, tokens[-1:], 5), row])
    close_to(runner.forward([Row(1, tokens[-1:], 5)])[0], expected[-1:])


def test_released_slots_are_empty(open_runner: Callable[..., Runner]) -> None:
    runner, tokens = open_runner(), sequence(6, 6)
    runner.forward([Row(1, tokens, 0)])
    runner.release(1)
    runner.release(1)
    with pytest.raises(ProviderRuntimeError):
        runner.forward([Row(1, tokens[:1], 6)])


def test_unknown_options_are_refused(open_runner: Callable[..., Runner]) -> None:
    with pytest.raises(UsageError, match="speed"):
        open_runner(options={"speed": 11})


def test_a_corrupt_model_is_a_typed_error(provider: Provider, tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"\x08\x0a broken")
    with pytest.raises(CarryallError):
        provider.session(path)


def test_closing_twice_is_fine(open_runner: Callable[..., Runner]) -> None:
    runner = open_runner()
    runner.close()
    runner.close()
