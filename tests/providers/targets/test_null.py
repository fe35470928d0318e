"""The toy model notices what would silently corrupt a real KV cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from engine_kit import make_runner

from carryall.errors import GraphError, ProviderRuntimeError, UsageError
from carryall.providers import get_provider
from carryall.providers.base import Row, RunnerConfig


def row(slot: int, tokens: list[int], start: int = 0, num_logits: int = 1) -> Row:
    return Row(slot, np.array(tokens, np.int64), start, num_logits)


def logits_of(tokens: list[int]) -> npt.NDArray[np.float32]:
    (logits,) = make_runner().forward([row(0, tokens)])
    return logits.copy()


def test_logits_depend_on_the_whole_history_and_on_nothing_else() -> None:
    runner = make_runner()
    runner.forward([row(2, [1, 2], num_logits=0), row(0, [9, 9, 9])])
    assert np.array_equal(runner.forward([row(2, [3], start=2)])[0], logits_of([1, 2, 3]))
    for other in ([2, 1, 3], [1, 2, 4], [0, 1, 2, 3], [2, 3]):
        assert not np.array_equal(logits_of(other), logits_of([1, 2, 3]))


def test_a_row_may_go_back_and_continue_otherwise() -> None:
    runner = make_runner()
    runner.forward([row(0, [1, 2, 3, 4])])
    assert np.array_equal(runner.forward([row(0, [7], start=2)])[0], logits_of([1, 2, 7]))


def test_logits_of_the_last_tokens_in_order() -> None:
    (logits,) = make_runner().forward([row(0, [5, 6, 7], num_logits=2)])
    assert np.array_equal(logits, np.concatenate([logits_of([5, 6]), logits_of([5, 6, 7])]))


def test_results_are_overwritten_by_the_next_run() -> None:
    runner = make_runner()
    (first,) = runner.forward([row(0, [1])])
    before = first.copy()
    runner.forward([row(1, [2])])
    assert not np.array_equal(first, before)


def test_prefix_copy_and_release() -> None:
    runner = make_runner()
    runner.forward([row(3, [1, 2, 3])])
    runner.copy_prefix(3, 0, 2)
    runner.release(3)
    assert runner.held_tokens() == 2
    assert np.array_equal(runner.forward([row(0, [9], start=2)])[0], logits_of([1, 2, 9]))
    with pytest.raises(ProviderRuntimeError, match="slot 3 holds 0 tokens, 1 cannot be copied"):
        runner.copy_prefix(3, 1, 1)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(0, [1], start=1)], "row starts at 1, but slot 0 holds 0"),
        ([row(0, [1]), row(0, [2])], "a slot appears twice"),
        ([row(9, [1])], "there is no slot 9"),
        ([row(0, [])], "does not fit"),
        ([row(0, [1] * 257)], "does not fit into 256"),
        ([row(0, [256])], "outside the vocabulary"),
        ([row(0, [1, 2], num_logits=3)], "3 logits wanted of 2 tokens"),
    ],
)
def test_mistakes_are_refused_and_change_nothing(rows: list[Row], words: str) -> None:
    runner = make_runner()
    with pytest.raises(ProviderRuntimeError, match=words):
        runner.forward([row(1, [1, 2]), *rows])
    assert runner.held_tokens() == 0


def test_provider_takes_the_vocabulary_of_the_model_or_the_option(tmp_path: Path) -> None:
    provider = get_provider("null")
    assert provider.available() is None
    runner = provider.runner(tmp_path / "none.onnx", RunnerConfig(options={"vocab_size": 11}))
    assert runner.info.vocab_size == 11


def test_provider_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    provider = get_provider("null")
    with pytest.raises(UsageError, match="provider 'null' has no option 'speed'; did you mean 'seed'"):
        provider.runner(tmp_path / "none.onnx", RunnerConfig(options={"speed": 1}))
    with pytest.raises(UsageError, match="runs no graphs"):
        provider.session(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"\x08\n broken")
    with pytest.raises(GraphError, match="cannot be read as ONNX"):
        provider.runner(tmp_path / "bad.onnx", RunnerConfig())
