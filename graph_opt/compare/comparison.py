"""Compare logits by the KL divergence of next-token distributions and by greedy tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..graph.lazy import Array
from .report import TokenResult


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
