"""Perplexity, divergence and agreement, against a plain computation over whole windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from carryall.errors import ProviderRuntimeError, UsageError
from carryall.providers.base import Row, Runner, RunnerInfo
from carryall.runtime.evaluate import evaluation
from carryall.runtime.evaluate.evaluation import compare_greedy, predict

VOCAB = 11


class Bigram(Runner):
    """A runner whose logits are a table row of the last token plus a small term of its position."""

    def __init__(self, seed: int, context_length: int = 64, vocab: int = VOCAB, noise: float = 0.0) -> None:
        rng = np.random.default_rng(seed)
        self.table = rng.standard_normal((vocab, vocab)).astype(np.float32)
        self.table += noise * np.random.default_rng(99).standard_normal((vocab, vocab)).astype(np.float32)
        self.info = RunnerInfo(vocab, context_length, 8, (), True)
        self.lengths = dict.fromkeys(range(8), 0)

    def logits(self, tokens: npt.NDArray[Any], start: int = 0) -> npt.NDArray[np.float32]:
        seen = np.arange(start, start + len(tokens), dtype=np.float32)
        result: npt.NDArray[np.float32] = self.table[tokens] * (1 + 0.01 * seen[:, None])
        return result

    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        results = []
        for row in rows:
            assert row.start <= self.lengths[row.slot]
            self.lengths[row.slot] = row.start + len(row.tokens)
            assert self.lengths[row.slot] <= self.info.context_length
            results.append(self.logits(row.tokens, row.start)[len(row.tokens) - row.num_logits :])
        return results

    @property
    def kv_bytes(self) -> int:
        return 0

    def copy_prefix(self, source: int, target: int, length: int) -> None: ...

    def release(self, slot: int) -> None: ...

    def close(self) -> None: ...


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    result: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    return result


def plain_losses(runner: Bigram, tokens: npt.NDArray[np.int64], window: int, stride: int) -> list[float]:
    losses: dict[int, float] = {}
    for begin in range(0, len(tokens), stride):
        part = tokens[begin : begin + window]
        scores = log_softmax(runner.logits(part))
        for i in range(1, len(part)):
            losses.setdefault(begin + i, float(-scores[i - 1, part[i]]))
    assert sorted(losses) == list(range(1, len(tokens)))
    return [losses[i] for i in sorted(losses)]


@pytest.mark.parametrize(
    ("count", "window", "stride"), [(40, 64, 32), (200, 64, 32), (97, 16, 15), (33, 2, 1)]
)
@pytest.mark.parametrize("piece", [3, 64])
def test_every_token_is_scored_once_with_the_context_of_its_window(
    count: int, window: int, stride: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "_PIECE", piece)
    tokens = np.random.default_rng(1).integers(0, VOCAB, count)
    told: list[tuple[object, ...]] = []
    found = predict(Bigram(0), tokens, window=window, stride=stride, progress=lambda *done: told.append(done))
    losses = plain_losses(Bigram(0), tokens, window, stride)
    assert found.tokens == count - 1
    assert found.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-6)
    assert found.mean_kl is None
    assert told[-1][:2] == (count, count)


@pytest.mark.parametrize(("window", "stride"), [(64, 32), (16, 14), (8, 6)])
def test_every_window_begins_as_a_text_does(window: int, stride: int) -> None:
    """Two tokens precede each window, which then scores its first token, too."""
    tokens, ahead = np.random.default_rng(1).integers(0, VOCAB, 100), [3, 7]
    found = predict(Bigram(0), tokens, window=window, stride=stride, beginning=ahead)
    losses: dict[int, float] = {}
    for begin in range(0, len(tokens), stride):
        part = np.array([*ahead, *tokens[begin : begin + window - 2]])
        scores = log_softmax(Bigram(0).logits(part))
        for i in range(2, len(part)):
            losses.setdefault(begin + i - 2, float(-scores[i - 1, part[i]]))
    assert found.tokens == len(losses) == 100
    assert found.perplexity == pytest.approx(np.exp(np.mean(list(losses.values()))), rel=1e-6)


def test_a_reference_is_compared_position_by_position() -> None:
    tokens = np.random.default_rng(1).integers(0, VOCAB, 60)
    model, reference = Bigram(0, noise=0.5), Bigram(0)
    found = predict(model, tokens, window=64, stride=32, reference=reference)
    own, other = (log_softmax(one.logits(tokens[:-1])) for one in (model, reference))
    divergence = (np.exp(other) * (other - own)).sum(1)
    assert found.mean_kl == pytest.approx(divergence.mean(), rel=1e-5)
    assert found.max_kl == pytest.approx(divergence.max(), rel=1e-5)
    assert found.top1_agreement == np.mean(own.argmax(1) == other.argmax(1))
    assert found.top1_agreement is not None
    assert 0 < found.top1_agreement < 1
    expected = np.exp(-other[np.arange(59), tokens[1:]].mean())
    assert found.reference_perplexity == pytest.approx(expected, rel=1e-6)


def test_a_model_agrees_with_itself() -> None:
    tokens = np.random.default_rng(1).integers(0, VOCAB, 60)
    found = predict(Bigram(0), tokens, window=64, stride=32, reference=Bigram(0))
    assert (found.mean_kl, found.top1_agreement) == (0, 1)
    greedy = compare_greedy(Bigram(0), Bigram(0), [tokens[:4], tokens[4:9]], 8)
    assert (greedy.agreement, greedy.equal_prompts) == (1, 2)


def test_greedy_agreement_counts_leading_tokens() -> None:
    """Both models predict the same next token, except after token 5."""
    first, second = Bigram(0), Bigram(0)
    for one in (first, second):
        one.table[:] = 0
        one.table[np.arange(VOCAB), (np.arange(VOCAB) + 1) % VOCAB] = 1
    second.table[5] = 0
    second.table[5, 0] = 1
    prompts = [np.array([2]), np.array([9, 8, 7])]  # continued 3 4 5 | 6 ... and 8 9 10 0 1 2
    greedy = compare_greedy(first, second, prompts, 6)
    assert greedy.agreement == (3 / 6 + 1) / 2
    assert (greedy.prompts, greedy.equal_prompts) == (2, 1)


@pytest.mark.parametrize(
    ("count", "window", "stride", "message"),
    [
        (15, 8, 4, "the text has 15 tokens; at least 16"),
        (20, 65, 4, "the window is 65 tokens long; it must be 2 to 64"),
        (20, 8, 8, "the stride is 8; it must be 1 to 7"),
    ],
)
def test_wrong_use_is_named(count: int, window: int, stride: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        predict(Bigram(0), np.zeros(count, np.int64), window=window, stride=stride)


def test_windows_must_hold_a_token_behind_the_beginning() -> None:
    tokens = np.zeros(20, np.int64)
    with pytest.raises(UsageError, match="the window is 2 tokens long; it must be 3 to 64"):
        predict(Bigram(0), tokens, window=2, stride=1, beginning=[1, 2])
    with pytest.raises(UsageError, match="the stride is 7; it must be 1 to 6"):
        predict(Bigram(0), tokens, window=8, stride=7, beginning=[1, 2])


def test_vocabularies_must_be_the_same() -> None:
    other: Runner = Bigram(0, vocab=12)
    with pytest.raises(UsageError, match="11 and 12 tokens"):
        predict(Bigram(0), np.zeros(20, np.int64), window=8, stride=4, reference=other)


def test_logits_that_are_no_numbers_are_an_error() -> None:
    broken = Bigram(0)
    broken.table[3] = np.nan
    with pytest.raises(ProviderRuntimeError, match="NaN or infinite"):
        predict(broken, np.arange(20) % VOCAB, window=8, stride=4)


def test_the_model_as_stored_is_scored_beside_the_model_as_run() -> None:
    tokens = np.random.default_rng(5).integers(0, VOCAB, 150)
    sizes: Any = {"window": 20, "stride": 9}
    found = predict(Bigram(1), tokens, reference=Bigram(3), stored=Bigram(2), **sizes)
    alone = predict(Bigram(2), tokens, reference=Bigram(3), **sizes)
    assert found.stored is not None
    for name in ("perplexity", "mean_kl", "max_kl", "top1_agreement"):
        assert getattr(found.stored, name) == pytest.approx(getattr(alone, name))
    assert found.mean_kl == pytest.approx(predict(Bigram(1), tokens, reference=Bigram(3), **sizes).mean_kl)
    unpaired = predict(Bigram(1), tokens, stored=Bigram(2), **sizes).stored
    assert unpaired is not None
    assert unpaired.mean_kl is None
