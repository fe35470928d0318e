"""Detect a watermark in a text: how many of its tokens carry the signal, and how likely that is by chance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...errors import UsageError
from ...records import dataclass
from ...reports import Report
from ..engine.sampling.watermarks import context_hash, green_tokens, ngram_values
from ..models.model_source import resolve_model
from ..text.tokenizer import Tokenizer
from ..types.arguments import checked_arguments
from ..types.watermark import Watermark

MARKED_BELOW = 1e-6  # of the p-value: one text in a million without the watermark is called marked
_SHORT = 200  # tokens; weaker watermarks need more
_MOST_EXACT = 20_000  # signals up to which the tail of the binomial distribution is summed


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionReport(Report):
    """The signal of a watermark in a text.

    Attributes:
        kind: of the watermark.
        tokens: of the text.
        scored: distinct pairs of a token and what is before it; repeated ones say nothing new.
        signals: green tokens, or values that are 1.
        chances: how many there could be: ``scored``, for synthid times the number of keys.
        expected: the share of signals without a watermark.
        z: how many standard deviations there are more signals than expected.
        p_value: the probability of so many signals or more without this watermark.
        verdict: ``marked`` below a p-value of 1e-6; ``too short`` if not even a text of signals alone would
            get there; else ``not found``.
    """

    kind: str
    tokens: int
    scored: int
    signals: int
    chances: int
    expected: float
    z: float
    p_value: float
    verdict: Literal["marked", "not found", "too short"]

    @property
    def marked(self) -> bool:
        """Whether the text carries the watermark."""
        return self.verdict == "marked"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        share = self.signals / self.chances if self.chances else 0.0
        rows = [
            ("watermark", self.kind),
            ("tokens", f"{self.tokens}, of which {self.scored} are scored"),
            ("signals", f"{self.signals} of {self.chances} ({share:.1%}), {self.expected:.1%} without it"),
            ("z-score", f"{self.z:.2f}"),
            ("p-value", f"{self.p_value:.2g}"),
            ("verdict", self.verdict),
        ]
        if self.verdict == "too short":
            rows.append(("note", "even a text of signals alone could not be told at this length"))
        elif self.verdict == "not found" and self.scored < _SHORT:
            rows.append(("note", f"a weak watermark needs more tokens: here are fewer than {_SHORT}"))
        return rows


@checked_arguments
def detect(
    model: str | Path, text: str, *, watermark: Watermark | Mapping[str, Any] | bool = True
) -> DetectionReport:
    """Look for a watermark in a text.

    The text is tokenized again: an edit changes the tokens around it, and the rest is still told. The result
    is about this watermark with its numbers, not about machines in general.

    Args:
        model: its tokenizer and the size of its vocabulary are used.
        text: without the prompt.
        watermark: as it was written; see ``SamplingParams.watermark``.

    Raises:
        InvalidSamplingError: the watermark is not valid.
        UsageError: the model has no tokenizer, or does not tell the size of its vocabulary.
    """
    wanted = Watermark.of(watermark)
    if wanted is None:
        raise UsageError("watermark must say which watermark is looked for")
    source = resolve_model(model)
    tokens = Tokenizer(source.folder).encode(text, add_special_tokens=False)
    return detect_in_tokens(tokens, wanted, _vocab_size(source.config, source.name))


def detect_in_tokens(tokens: list[int], watermark: Watermark, vocab_size: int) -> DetectionReport:
    """Look for a watermark in the tokens of a text; see ``detect``."""
    if watermark.kind == "green":
        scored, signals = _green_signals(tokens, watermark, vocab_size)
        chances, expected = scored, int(vocab_size * watermark.ratio) / vocab_size
    else:
        scored, signals = _synthid_signals(tokens, watermark)
        chances, expected = scored * len(watermark.keys), 0.5
    p_value = _tail(signals, chances, expected)
    spread = math.sqrt(chances * expected * (1 - expected))
    best = expected**chances  # the p-value of signals alone
    verdict: Literal["marked", "not found", "too short"] = "not found"
    if best >= MARKED_BELOW:
        verdict = "too short"
    elif p_value < MARKED_BELOW:
        verdict = "marked"
    return DetectionReport(
        kind=watermark.kind,
        tokens=len(tokens),
        scored=scored,
        signals=signals,
        chances=chances,
        expected=expected,
        z=(signals - chances * expected) / spread if spread else 0.0,
        p_value=p_value,
        verdict=verdict,
    )


def _green_signals(tokens: list[int], watermark: Watermark, vocab_size: int) -> tuple[int, int]:
    """Return the number of distinct pairs of tokens, and of those whose second token is green."""
    pairs = sorted(set(itertools.pairwise(tokens)))  # sorted, so that lists are made once
    green = sum(bool(green_tokens(watermark, vocab_size, before)[token]) for before, token in pairs)
    return len(pairs), green


def _synthid_signals(tokens: list[int], watermark: Watermark) -> tuple[int, int]:
    """Return the number of n-grams whose context is new, and of their values that are 1."""
    width, seen, signals, scored = watermark.ngram_length - 1, set[int](), 0, 0
    for place in range(width, len(tokens)):
        context = context_hash(tokens[place - width : place])
        if int(context[0]) in seen:
            continue
        seen.add(int(context[0]))
        scored += 1
        signals += int(ngram_values(watermark, context, np.array([tokens[place]], np.int64)).sum())
    return scored, signals


def _tail(signals: int, chances: int, share: float) -> float:
    """Return the probability of at least so many signals: exact, for long texts the normal distribution's."""
    if not signals:
        return 1.0
    if chances > _MOST_EXACT:
        z = (signals - 0.5 - chances * share) / math.sqrt(chances * share * (1 - share))
        return 0.5 * math.erfc(z / math.sqrt(2))
    counts = np.arange(signals, chances + 1)
    ways = [
        math.lgamma(chances + 1) - math.lgamma(k + 1) - math.lgamma(chances - k + 1) for k in counts.tolist()
    ]
    logs = np.array(ways) + counts * math.log(share) + (chances - counts) * math.log1p(-share)
    most = float(logs.max())
    return min(1.0, math.exp(most) * float(np.exp(logs - most).sum()))


def _vocab_size(config: Mapping[str, Any], name: str) -> int:
    inner = config.get("text_config")
    size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, Mapping) else None)
    if not isinstance(size, int) or size < 1:
        raise UsageError(f"{name} has no vocab_size in config.json, which green lists need")
    return size
