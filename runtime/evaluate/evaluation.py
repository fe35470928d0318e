"""Evaluate a model on a text: perplexity, and divergence from a reference model.

Each token is scored once, in overlapping windows (https://huggingface.co/docs/transformers/perplexity). Only
a few rows of logits are held at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...errors import ProviderRuntimeError, UsageError
from ...progress import Progress
from ...providers.base import Row, Runner
from ...records import dataclass

Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]
MIN_TOKENS = 16
_PIECE = 64  # rows of logits held at a time
_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The result of scoring a text.

    Attributes:
        tokens: number of scored tokens.
        perplexity: exp of the mean negative log-likelihood per token.
        mean_kl: mean Kullback-Leibler divergence from the reference's next-token distribution, in nats.
        max_kl: the largest divergence of a position, in nats.
        top1_agreement: share of positions where both models have the same most likely token.
        reference_perplexity: perplexity of the reference.
        tokens_per_second: prefill speed of the model, without the time of the reference.
        stored: the price as stored; None if it was not measured.

    The values that need a reference are None without one.
    """

    tokens: int
    perplexity: float
    tokens_per_second: float
    reference_perplexity: float | None = None
    mean_kl: float | None = None
    max_kl: float | None = None
    top1_agreement: float | None = None
    stored: Stored | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The same for the model as it is stored: its graph with activations in float32.

    Attributes:
        perplexity: as in ``Prediction``, like the others.
        mean_kl: None without a reference.
        max_kl: None without a reference.
        top1_agreement: None without a reference.
    """

    perplexity: float
    mean_kl: float | None = None
    max_kl: float | None = None
    top1_agreement: float | None = None


class Forward(Protocol):
    """The part of ``Runner`` that computes logits."""

    def forward(self, rows: Sequence[Row]) -> Sequence[Logits]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyAgreement:
    """A comparison of the greedy outputs of two models.

    Attributes:
        prompts: number of prompts.
        equal_prompts: number of prompts with equal outputs.
        agreement: mean share of leading tokens that are equal.
        tokens_per_second: speed of the first model, all prompts in one batch.
    """

    prompts: int
    equal_prompts: int
    agreement: float
    tokens_per_second: float


@dataclass(slots=True)
class _Sums:
    count: int = 0
    loss: float = 0.0
    reference_loss: float = 0.0
    kl: float = 0.0
    max_kl: float = 0.0
    agreeing: int = 0
    seconds: float = 0.0
    read: int = 0


def predict(
    runner: Runner,
    tokens: Tokens,
    *,
    window: int,
    stride: int,
    reference: Runner | None = None,
    stored: Forward | None = None,
    beginning: Sequence[int] = (),
    progress: Progress | None = None,
) -> Prediction:
    """Score a text.

    Args:
        runner: the model; its slot 0 is used.
        tokens: [n], the tokens of the text, without ``beginning``.
        window: tokens of a window, with ``beginning``.
        stride: distance between the starts of two windows, less than ``window``.
        reference: the model to compare with.
        stored: runs the model as it is stored.
        beginning: tokens that precede every window, as the model expects before a text.
        progress: called after every window.

    Raises:
        UsageError: the text is too short, the windows are out of range, or the vocabularies differ.
        ProviderRuntimeError: the run failed, or its logits are NaN or infinite.
    """
    ahead = np.array(beginning, np.int64)
    _check(runner, tokens, window, stride, reference, max(1, len(ahead)))
    sums, as_stored = _Sums(), _Sums()
    others = {"reference": reference, "stored": stored}
    runners: dict[str, Forward] = {
        "run": runner,
        **{name: one for name, one in others.items() if one is not None},
    }
    for begin, first, end in _windows(len(tokens), window - len(ahead), stride, int(not len(ahead))):
        part = np.concatenate([ahead, tokens[begin:end]])
        _score_window(runners, part, first - begin + len(ahead), sums, as_stored)
        if progress is not None:
            progress(end, len(tokens), "")
    compared = reference is not None
    return Prediction(
        tokens=sums.count,
        perplexity=math.exp(sums.loss / sums.count),
        tokens_per_second=sums.read / sums.seconds,
        reference_perplexity=math.exp(sums.reference_loss / sums.count) if compared else None,
        mean_kl=sums.kl / sums.count if compared else None,
        max_kl=sums.max_kl if compared else None,
        top1_agreement=sums.agreeing / sums.count if compared else None,
        stored=None if stored is None else _stored(as_stored, compared=compared),
    )


def _stored(sums: _Sums, *, compared: bool) -> Stored:
    return Stored(
        perplexity=math.exp(sums.loss / sums.count),
        mean_kl=sums.kl / sums.count if compared else None,
        max_kl=sums.max_kl if compared else None,
        top1_agreement=sums.agreeing / sums.count if compared else None,
    )


def compare_greedy(
    runner: Runner, reference: Runner, prompts: Sequence[Tokens], new_tokens: int
) -> GreedyAgreement:
    """Generate greedily from prompts with both models, all prompts in one batch, and compare the outputs.

    Raises:
        ProviderRuntimeError: a run failed.
    """
    start = time.perf_counter()
    continuations = _continue(runner, prompts, new_tokens)
    seconds = time.perf_counter() - start
    other = _continue(reference, prompts, new_tokens)
    leading = (continuations == other).cumprod(axis=1).sum(axis=1)
    return GreedyAgreement(
        prompts=len(prompts),
        equal_prompts=int((leading == new_tokens).sum()),
        agreement=float(leading.mean() / new_tokens),
        tokens_per_second=continuations.size / seconds,
    )


def greedy_agreement(
    runners: Sequence[Runner],
    tokens: Tokens,
    prompts: int,
    new_tokens: int,
    beginning: Sequence[int] = (),
) -> GreedyAgreement | None:
    """Compare greedy outputs on prompts spread evenly over a text; None without a second model.

    Every prompt begins with ``beginning``.
    """
    if len(runners) < 2 or not prompts:
        return None
    longest = min(runner.info.context_length for runner in runners)
    ahead = np.array(beginning, np.int64)
    new_tokens = min(new_tokens, longest - 1 - len(ahead))
    size = min(_PROMPT_TOKENS, longest - new_tokens - len(ahead), len(tokens))
    places = np.linspace(0, len(tokens) - size, prompts).astype(int)
    texts = [np.concatenate([ahead, tokens[place : place + size]]) for place in places]
    return compare_greedy(runners[0], runners[1], texts, new_tokens)


def _check(
    runner: Runner, tokens: Tokens, window: int, stride: int, reference: Runner | None, unscored: int
) -> None:
    if len(tokens) < MIN_TOKENS:
        raise UsageError(f"the text has {len(tokens)} tokens; at least {MIN_TOKENS} are needed")
    longest = min(one.info.context_length for one in (runner, reference) if one is not None)
    if not unscored < window <= longest:
        raise UsageError(
            f"the window is {window} tokens long; it must be {unscored + 1} to {longest}, the context length"
        )
    if not 1 <= stride <= window - unscored:
        raise UsageError(f"the stride is {stride}; it must be 1 to {window - unscored}, less than the window")
    if reference is not None and reference.info.vocab_size != runner.info.vocab_size:
        raise UsageError(
            f"the models have {runner.info.vocab_size} and {reference.info.vocab_size} tokens; "
            "only models with the same vocabulary can be compared"
        )


def _windows(count: int, window: int, stride: int, scored: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, first scored, end) of windows that score every token from ``scored`` on once."""
    begin = 0
    while scored < count:
        end = min(begin + window, count)
        yield begin, scored, end
        begin, scored = begin + stride, end


def _score_window(
    runners: Mapping[str, Forward], tokens: Tokens, first: int, sums: _Sums, stored: _Sums
) -> None:
    """Score tokens [first, n) of a window; token i is predicted by the logits of token i - 1."""
    starts = [0, *range(first - 1, len(tokens) - 1, _PIECE)]
    for begin, end in zip(starts, [*starts[1:], len(tokens) - 1], strict=True):
        if begin == end:
            continue
        scored = begin >= first - 1
        logits = {}
        for name, one in runners.items():
            start = time.perf_counter()
            row = Row(0, tokens[begin:end], begin, num_logits=end - begin if scored else 0)
            logits[name] = one.forward([row])[0]
            sums.seconds += time.perf_counter() - start if name == "run" else 0.0
        sums.read += end - begin
        if not scored:
            continue
        targets, reference = tokens[begin + 1 : end + 1], logits.get("reference")
        _add(sums, targets, logits["run"], reference)
        if "stored" in logits:
            _add(stored, targets, logits["stored"], reference)


def _add(sums: _Sums, targets: Tokens, logits: Logits, reference: Logits | None) -> None:
    rows = np.arange(len(targets))
    logprobs = _log_softmax(logits)
    others = [] if reference is None else [_log_softmax(reference)]
    sums.count += len(targets)
    sums.loss -= float(logprobs[rows, targets].sum())
    for other in others:
        divergence = (np.exp(other) * (other - logprobs)).sum(axis=1)
        sums.reference_loss -= float(other[rows, targets].sum())
        sums.kl += float(divergence.sum())
        sums.max_kl = max(sums.max_kl, float(divergence.max()))
        sums.agreeing += int((logprobs.argmax(axis=1) == other.argmax(axis=1)).sum())


def _continue(runner: Runner, prompts: Sequence[Tokens], new_tokens: int) -> Tokens:
    """Return the greedy outputs [prompts, new_tokens]."""
    rows = [Row(slot, prompt, 0) for slot, prompt in enumerate(prompts)]
    result = np.empty((len(prompts), new_tokens), np.int64)
    for step in range(new_tokens):
        for slot, logits in enumerate(runner.forward(rows)):
            result[slot, step] = logits[-1].argmax()
        rows = [Row(row.slot, result[row.slot, step : step + 1], row.start + len(row.tokens)) for row in rows]
    return result


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    if not np.isfinite(logits).all():
        raise ProviderRuntimeError("the model's logits are NaN or infinite")
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
