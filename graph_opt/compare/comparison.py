"""What two graphs returned, compared: the error of each output, and of logits what it does to the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..graph.lazy import Array


@dataclass(frozen=True, slots=True)
class OutputError:
    """How far an output of ``b`` is from that of ``a``.

    Attributes:
        max_abs: largest difference.
        max_rel: the same, relative to the largest value of ``a``.
    """

    max_abs: float
    max_rel: float


@dataclass(frozen=True, slots=True)
class Bar:
    """What a comparison must not exceed.

    Attributes:
        max_kl: KL divergence in nats, where there are logits.
        max_error: relative error of an output, elsewhere.
    """

    max_kl: float
    max_error: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far what ``b`` returns is from what ``a`` returns.

    Attributes:
        max_abs: largest difference, of the logits where there are some.
        max_rel: the same, relative to the largest value.
        outputs: the error of each output that both have; that of a KV cache after the last step.
    """

    max_abs: float
    max_rel: float
    outputs: dict[str, OutputError] = field(default_factory=dict)

    def misses(self, bar: Bar) -> str | None:
        """Say in which way this exceeds a bar; None if it does not."""
        if self.max_rel <= bar.max_error:
            return None
        return (
            f"the relative error {self.max_rel:.2g} of output {self.worst_output()} is above the bar "
            f"{bar.max_error:g} (--max-error)"
        )

    def worst_output(self, *, without: str = "") -> str | None:
        """Return the name of the output with the largest relative error, None if there is none."""
        names = [name for name in self.outputs if name != without]
        return max(
            names, key=lambda name: np.nan_to_num(self.outputs[name].max_rel, nan=np.inf), default=None
        )

    def __str__(self) -> str:
        return (
            f"outputs differ by {self.max_abs:.2g} at most, {self.max_rel:.2g} of the largest value "
            f"({self.worst_output()})"
        )


@dataclass(frozen=True, kw_only=True)
class LogitsComparison(Comparison):
    """The same for decoders, with what the differences do to the tokens.

    Attributes:
        kl: largest Kullback-Leibler divergence of b's next-token distribution from a's, in nats.
        mean_kl: its mean.
        greedy_equal: leading greedy tokens, of ``steps``, that are the same.
    """

    kl: float
    mean_kl: float
    greedy_equal: int
    steps: int

    def misses(self, bar: Bar) -> str | None:
        """See ``Comparison``."""
        if self.kl <= bar.max_kl:
            return None
        return f"KL {self.kl:.2g} is above the bar {bar.max_kl:g} (--max-kl)"

    def __str__(self) -> str:
        text = (
            f"greedy tokens equal: {self.greedy_equal} of {self.steps}; KL {self.kl:.2g} at most, "
            f"{self.mean_kl:.2g} on average; logits differ by {self.max_abs:.2g} at most"
        )
        cache = self.worst_output(without="logits")
        if cache is None:
            return text
        far = self.outputs[cache].max_rel
        if np.isinf(far):
            return f"{text}; {cache} has another shape, or is infinite"
        return f"{text}; {cache} by {far:.2g} of its largest value"


def compared_logits(
    left: Array, right: Array, agree: Sequence[bool], outputs: dict[str, OutputError]
) -> LogitsComparison:
    """Compare logits [n, vocab].

    Args:
        left: of ``a``.
        right: of ``b``.
        agree: for each step, whether the greedy tokens are the same.
        outputs: errors of the outputs, "logits" among them.
    """
    with np.errstate(invalid="ignore"):
        divergence = _kl(left, right)
    return LogitsComparison(
        max_abs=outputs["logits"].max_abs,
        max_rel=outputs["logits"].max_rel,
        kl=float(divergence.max()),
        mean_kl=float(divergence.mean()),
        greedy_equal=[*agree, False].index(False),
        steps=len(agree),
        outputs=outputs,
    )


def worst(found: Sequence[LogitsComparison]) -> LogitsComparison:
    """Return the worst of each figure of several comparisons of logits; steps add up."""
    names = list(dict.fromkeys(name for one in found for name in one.outputs))
    both = largest_error([OutputError(one.max_abs, one.max_rel) for one in found])
    return LogitsComparison(
        max_abs=both.max_abs,
        max_rel=both.max_rel,
        kl=float(np.max([one.kl for one in found])),
        mean_kl=float(np.max([one.mean_kl for one in found])),
        greedy_equal=sum(one.greedy_equal for one in found),
        steps=sum(one.steps for one in found),
        outputs={
            name: largest_error([one.outputs[name] for one in found if name in one.outputs]) for name in names
        },
    )


def output_errors(left: Mapping[str, Array], right: Mapping[str, Array]) -> dict[str, OutputError]:
    """Compare the outputs that both have."""
    both = [name for name in left if name in right]
    return {name: output_error(left[name], right[name]) for name in both}


def output_error(left: Array, right: Array) -> OutputError:
    """Compare two tensors; NaN and infinity equal themselves, other shapes and texts are infinitely far."""
    if left.shape != right.shape or left.dtype.kind in "OUS":
        far = 0.0 if left.shape == right.shape and bool((left == right).all()) else np.inf
        return OutputError(far, far)
    exact, other = left.astype(np.float64), right.astype(np.float64)
    if not exact.size:
        return OutputError(0.0, 0.0)
    with np.errstate(invalid="ignore"):
        same = (exact == other) | (np.isnan(exact) & np.isnan(other))
        difference = float(np.abs(np.where(same, 0.0, exact - other)).max())
    largest = float(np.abs(exact, where=np.isfinite(exact), out=np.zeros_like(exact)).max())
    return OutputError(difference, difference / max(largest, float(np.finfo(np.float32).tiny)))


def largest_error(errors: Sequence[OutputError]) -> OutputError:
    """Return the largest of both figures, NaN if there is one."""
    return OutputError(
        *(float(np.max([getattr(one, name) for one in errors])) for name in ("max_abs", "max_rel"))
    )


def _kl(left: Array, right: Array) -> npt.NDArray[np.float64]:
    p, q = (_log_softmax(side.astype(np.float64)) for side in (left, right))
    # A token that a rules out adds nothing, whatever b says of it.
    terms = np.multiply(np.exp(p), p - q, where=~np.isneginf(p), out=np.zeros_like(p))
    divergence: npt.NDArray[np.float64] = terms.sum(-1)
    return divergence


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
