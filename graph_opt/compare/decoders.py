"""Compare two decoders on the same tokens; each may follow any of the contracts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...contract import LOGITS, is_present
from ...errors import UsageError
from ...progress import Progress
from ...records import dataclass
from ..graph.lazy import Array
from .bars import MAX_ERROR, MAX_KL_FLOAT, MAX_KL_ROUNDED, Bars
from .report import TokenResult, VerifyReport
from .runners import GraphRunner, Logits, Tokens
from .tally import OutputResult, Tally


@dataclass(slots=True)
class TokenTally:
    """Accumulates comparisons of logits over several runs."""

    _kl: list[npt.NDArray[np.float64]] = field(default_factory=list)
    _agree: list[list[bool]] = field(default_factory=list)

    def add(self, left: Array, right: Array) -> None:
        """Compare logits [n, vocab] of the reference (``left``) with those of the candidate (``right``)."""
        with np.errstate(invalid="ignore"):
            self._kl.append(divergence(left, right))
        self._agree[-1].append(bool(left[-1].argmax() == right[-1].argmax()))

    def start(self) -> None:
        """Start another sequence."""
        self._agree.append([])

    def result(self) -> TokenResult:
        """Return maximum and mean KL divergence over all positions, and the equal greedy tokens."""
        kl = np.concatenate(self._kl)
        return TokenResult(
            kl=float(kl.max()),
            mean_kl=float(kl.mean()),
            greedy_equal=sum([*agree, False].index(False) for agree in self._agree),
            steps=sum(map(len, self._agree)),
        )


def divergence(left: Array, right: Array) -> npt.NDArray[np.float64]:
    """Return KL(left || right) of the distributions of logits [n, vocab], [n] in nats."""
    if left.shape != right.shape:
        return np.full(1, np.inf)
    p, q = (_log_softmax(side.astype(np.float64)) for side in (left, right))
    # A token with probability 0 in the reference contributes nothing.
    terms = np.multiply(np.exp(p), p - q, where=~np.isneginf(p), out=np.zeros_like(p))
    found: npt.NDArray[np.float64] = terms.sum(-1)
    return found


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


_CUTS = (11, 13, 26)  # positions at which a sequence is split into pieces
_BATCH = (0.2, 0.55, 1.0)  # lengths of the sequences of a batch, relative to the longest
_BATCH_STEPS = 3
_CACHED_TOKENS = 256
_AFTER_CACHE = 8


class GraphDecoder(Protocol):
    """The interface of ``GraphRunner``, for other ways to run a graph."""

    @property
    def vocab_size(self) -> int | str: ...

    def forward(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]: ...

    def forward_together(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]: ...

    def cache(self, row: int) -> dict[str, Array]:
        """See ``GraphRunner``; {} if the cache cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """The runs of a comparison.

    Attributes:
        prompts: token ids, each prompt a separate sequence.
        steps: number of greedy tokens of the reference after each prompt.
        others: random tokens for pieces, batches and caches; empty if the caller gave tokens.
        reach: upper bound of the masks' windows, as far as the graphs state it.
        context_length: maximum tokens of a sequence; None if unknown.
        width: number of tokens that a graph accepts at a time, None for any number.
    """

    prompts: Sequence[Sequence[int]]
    steps: int
    others: Sequence[Sequence[int]] = ()
    reach: int = 0
    context_length: int | None = None
    width: int | None = None

    @property
    def cached(self) -> int:
        """Number of tokens of the synthetic cache; 0 if the context length is unknown or too short."""
        if self.context_length is None or not self.others:
            return 0
        return max(min(self.context_length - _AFTER_CACHE, max(_CACHED_TOKENS, self.reach + _AFTER_CACHE)), 0)

    @property
    def max_length(self) -> int:
        """Maximum tokens of a sequence."""
        prompts = max(map(len, self.prompts)) + self.steps
        batches = max(map(len, self.others[1:]), default=0) + self.batch_steps
        longest = len(self.others[0]) if self.others else 0
        return max(prompts, batches, longest, self.cached + _AFTER_CACHE if self.cached else 0)

    @property
    def batch_steps(self) -> int:
        """Number of greedy tokens after a batch."""
        return min(_BATCH_STEPS, self.steps)

    @property
    def slots(self) -> int:
        """Number of sequences."""
        return len(self.prompts) + (2 + 2 * len(_BATCH) if self.others else 0)


@dataclass(slots=True)
class Comparer:
    """Runs both decoders and accumulates the differences.

    Args:
        first: the reference.
        second: the candidate.
        width: number of tokens that a graph accepts at a time, None for any number.
    """

    first: GraphDecoder
    second: GraphDecoder
    width: int | None = None
    tokens: TokenTally = field(default_factory=TokenTally)
    logits: Tally = field(default_factory=lambda: Tally(by_slice=False))
    caches: dict[str, Tally] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self, plan: ComparisonPlan, progress: Progress | None = None) -> None:
        """Run the whole plan."""
        rows = iter(range(plan.slots))
        work: list[Callable[[], None]] = []
        for prompt in plan.prompts:
            work.append(partial(self._prompt, next(rows), prompt, plan.steps))
        if plan.others:
            work.append(partial(self._pieces, next(rows), plan.others[0]))
            batch, alone = ([next(rows) for _ in _BATCH] for _ in range(2))
            work.append(partial(self._batch, batch, alone, plan))
            work.append(partial(self._cached, next(rows), plan))
        for number, one in enumerate(work):
            one()
            if progress is not None:
                progress(number + 1, len(work), "")

    def _prompt(self, row: int, prompt: Sequence[int], steps: int) -> None:
        self.inputs.append(f"{len(prompt)} tokens and {steps} greedy tokens after them")
        self._sequence(row, [np.array(prompt, np.int64)], steps)

    def _pieces(self, row: int, tokens: Sequence[int]) -> None:
        """Run a sequence in pieces, to test several tokens on a cache."""
        cuts = sorted({0, len(tokens), *(cut for cut in _CUTS if cut < len(tokens))})
        pieces = [np.array(tokens[start:end], np.int64) for start, end in itertools.pairwise(cuts)]
        self.inputs.append(f"{len(tokens)} tokens in pieces of {', '.join(str(len(one)) for one in pieces)}")
        self._sequence(row, pieces, 0)

    def _sequence(self, row: int, pieces: Sequence[Tokens], steps: int) -> None:
        self.tokens.start()
        tokens = pieces[0]
        for number in range(len(pieces) + steps):
            tokens = pieces[number] if number < len(pieces) else tokens
            left, right = (self._forward(side, row, tokens) for side in (self.first, self.second))
            self._add(left, right)
            tokens = left[-1:].argmax(-1)
        self._add_caches(row)

    def _batch(self, rows: Sequence[int], alone: Sequence[int], plan: ComparisonPlan) -> None:
        """Run sequences of different lengths in one batch, padded if a graph's mask hides padding."""
        lengths = [max(round(len(plan.others[-1]) * share), 1) for share in _BATCH]
        sequences = [
            np.array(tokens[:length], np.int64)
            for tokens, length in zip(plan.others[-3:], lengths, strict=True)
        ]
        step = {row: sequences[number] for number, row in enumerate(rows)}
        if self.width is not None:
            self.notes.append(f"no batches were compared: a graph accepts {self.width} tokens at a time")
            return
        left = self.first.forward_together(step)
        for number, row in enumerate(alone):
            expected = self.first.forward({row: sequences[number]})[row]
            if not _near(left[rows[number]], expected):
                self.notes.append(
                    "no batches were compared: the reference gives different results in a batch"
                )
                return
        # A trace that counts positions rotates the keys of padded rows by other angles; its logits are equal.
        alike = all(
            _near(there, here)
            for row, tokens in zip(rows, alone, strict=True)
            for there, here in zip(
                self.first.cache(row).values(), self.first.cache(tokens).values(), strict=True
            )
        )
        self.inputs.append(f"{len(rows)} sequences of {', '.join(map(str, lengths))} tokens in one batch")
        for number in range(plan.batch_steps + 1):
            right = self.second.forward_together(step)
            for row in rows:
                self.tokens.start()
                self._add(left[row], right[row])
            step = {row: left[row][-1:].argmax(-1) for row in rows}
            if number < plan.batch_steps:
                left = self.first.forward_together(step)
        if not alike:
            self.notes.append("caches of the batch were not compared: padding changes the reference's")
            return
        for row in rows:
            self._add_caches(row)

    def _cached(self, row: int, plan: ComparisonPlan) -> None:
        """Start from a long synthetic cache of repeated entries that the reference computed.

        Recurrent states have no entries, and stay as they were computed.
        """
        content = self.first.cache(0)
        if not plan.cached or not any(map(is_present, content)) or not isinstance(self.first, GraphRunner):
            return
        if not isinstance(self.second, GraphRunner):
            return
        length = min(part.shape[1] for name, part in content.items() if is_present(name))
        order = np.random.default_rng(0).integers(0, length, plan.cached)
        content = {
            name: np.ascontiguousarray(part[:, order]) if is_present(name) else part
            for name, part in content.items()
        }
        try:
            for side in (self.first, self.second):
                side.fill(row, content)
        except UsageError as error:
            self.notes.append(f"a long cache was not tested: {error}")
            return
        tokens = np.array(plan.others[0][:_AFTER_CACHE], np.int64)
        self.inputs.append(f"{len(tokens)} tokens after {plan.cached} cached ones")
        self._sequence(row, [tokens[:1], tokens[1:2], tokens[2:]], 0)

    def _forward(self, side: GraphDecoder, row: int, tokens: Tokens) -> Logits:
        pieces = (
            [tokens] if self.width is None else np.split(tokens, range(self.width, len(tokens), self.width))
        )
        return np.concatenate([side.forward({row: piece})[row] for piece in pieces])

    def _add(self, left: Logits, right: Logits) -> None:
        self.tokens.add(left, right)
        self.logits.add(left, right)

    def _add_caches(self, row: int) -> None:
        left, right = self.first.cache(row), self.second.cache(row)
        for name in left:
            if name in right:
                self.caches.setdefault(name, Tally(by_slice=False)).add(left[name], right[name])


def decoder_report(comparer: Comparer, names: tuple[str, str], bars: Bars, *, rounded: bool) -> VerifyReport:
    """Judge the results of a comparer.

    The KL divergence is always judged. Logits and caches are judged too if both graphs compute in float32
    and the caller set no ``max_kl``, or if the caller set ``max_error``; otherwise they are only reported.

    Args:
        comparer: a comparer after its run.
        names: the names of the two in messages.
        bars: the caller's tolerances.
        rounded: whether a graph rounds its activations.
    """
    strict = bars.max_error is not None or (bars.max_kl is None and not rounded)
    max_kl = bars.max_kl if bars.max_kl is not None else (MAX_KL_ROUNDED if rounded else MAX_KL_FLOAT)
    resolved = Bars(
        max_kl=max_kl,
        max_error=MAX_ERROR if bars.max_error is None else bars.max_error,
        max_mismatch=bars.max_mismatch,
    )
    logits = replace(comparer.logits.result(resolved), kind=LOGITS)
    outputs = {LOGITS: logits} | {name: outcome.result(resolved) for name, outcome in comparer.caches.items()}
    return VerifyReport(
        reference=names[0],
        candidate=names[1],
        bars=resolved,
        outputs=outputs if strict else {name: _reported(outcome) for name, outcome in outputs.items()},
        tokens=comparer.tokens.result(),
        inputs=tuple(comparer.inputs),
        notes=tuple(comparer.notes),
    )


def _reported(one: OutputResult) -> OutputResult:
    return replace(one, judged=False)


def _near(left: Logits, right: Logits) -> bool:
    return bool(np.abs(left - right).max() <= MAX_ERROR * np.abs(right).max())
