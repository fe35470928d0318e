"""What differences of logits do to the next token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..graph.lazy import Array
from .report import TokenResult


@dataclass(slots=True)
class TokenTally:
    """Adds up what is compared of the logits of several runs."""

    _kl: list[npt.NDArray[np.float64]] = field(default_factory=list)
    _agree: list[list[bool]] = field(default_factory=list)

    def add(self, left: Array, right: Array) -> None:
        """Compare logits [n, vocab] of the reference with those of the candidate."""
        with np.errstate(invalid="ignore"):
            self._kl.append(divergence(left, right))
        self._agree[-1].append(bool(left[-1].argmax() == right[-1].argmax()))

    def start(self) -> None:
        """Begin with another sequence."""
        self._agree.append([])

    def result(self) -> TokenResult:
        """Return the worst and the mean over everything; the greedy tokens of all sequences are counted."""
        kl = np.concatenate(self._kl)
        return TokenResult(
            kl=float(kl.max()),
            mean_kl=float(kl.mean()),
            greedy_equal=sum([*agree, False].index(False) for agree in self._agree),
            steps=sum(map(len, self._agree)),
        )


def divergence(left: Array, right: Array) -> npt.NDArray[np.float64]:
    """Return the KL divergence [n] in nats of the distributions of ``right`` [n, vocab] from ``left``'s."""
    if left.shape != right.shape:
        return np.full(1, np.inf)
    p, q = (_log_softmax(side.astype(np.float64)) for side in (left, right))
    # A token that the reference rules out adds nothing, whatever the candidate says of it.
    terms = np.multiply(np.exp(p), p - q, where=~np.isneginf(p), out=np.zeros_like(p))
    found: npt.NDArray[np.float64] = terms.sum(-1)
    return found


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
