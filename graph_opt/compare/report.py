"""The report of a verification."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

import numpy as np

from ...contract import LOGITS
from ...errors import VerificationError
from ...records import dataclass
from .bars import MAX_KL_FLOAT, Bars
from .tally import KEYS, OutputResult

_ROUNDINGS = 3  # the mean divergence of another kernel with the same rounding, as a multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenResult:
    """The differences of next-token distributions.

    Attributes:
        kl: largest Kullback-Leibler divergence KL(reference || candidate) of a position, in nats.
        mean_kl: mean over all positions, in nats.
        greedy_equal: number of greedy tokens before the first difference of each sequence, in total.
        steps: number of greedy tokens compared.
    """

    kl: float
    mean_kl: float
    greedy_equal: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of comparing a candidate with its reference.

    Attributes:
        reference: name of the reference in messages.
        candidate: name of the candidate in messages.
        bars: the tolerances; ``max_kl`` is a number for decoders.
        outputs: the result of each output by name; for decoders, of the logits and caches.
        interface: differences of the inputs' and outputs' names, order and types; none for decoders, which
            are called by the contract.
        tokens: the comparison of tokens, for decoders.
        inputs: description of the inputs, one line per run.
        notes: limits of the comparison.
        exact: the comparison of the candidate with its products in float32; None if it does not round them to
            int8, if the caller set a limit, or if a graph of dynamic quantization passed without.
        simulated: the effect of rounding alone: the tokens of the candidate with simulated rounding. None if
            the candidate is within ``max_kl``, or ``exact`` is None or failed.
    """

    reference: str
    candidate: str
    bars: Bars
    outputs: Mapping[str, OutputResult] = field(default_factory=dict)
    interface: tuple[str, ...] = ()
    tokens: TokenResult | None = None
    inputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    exact: VerifyReport | None = None
    simulated: TokenResult | None = None

    @property
    def failures(self) -> tuple[str, ...]:
        """A changed interface, then the differences above the tolerances, as text."""
        texts = [f"the candidate {change}" for change in self.interface]
        if self.exact is not None:
            texts += [f"{one}, with products in float32" for one in self.exact.failures]
        if self.tokens is not None:
            texts += self._token_failures(self.tokens)
        broken = [(name, one) for name, one in self.outputs.items() if one.reason is not None and one.judged]
        broken.sort(key=lambda item: -np.nan_to_num(item[1].max_rel, nan=np.inf))
        return (*texts, *(f"output {name} {one.reason}" for name, one in broken))

    def _token_failures(self, tokens: TokenResult) -> list[str]:
        if self.simulated is None:
            if tokens.kl <= (self.bars.max_kl or 0.0):
                return []
            return [f"KL {tokens.kl:.2g} is above the limit {self.bars.max_kl:g} (--max-kl)"]
        limit = _ROUNDINGS * self.simulated.mean_kl + MAX_KL_FLOAT
        if tokens.mean_kl <= limit:
            return []
        return [
            f"mean KL {tokens.mean_kl:.2g} is above {limit:.2g}, {_ROUNDINGS} times the effect of rounding "
            "activations to int8 (--max-kl sets a limit for the largest KL instead)"
        ]

    @property
    def passed(self) -> bool:
        """Whether all differences are within the tolerances."""
        return not self.failures

    def check(self) -> None:
        """Raise an error if the comparison failed.

        Raises:
            VerificationError: a tolerance is exceeded; the message has the first failure and the number of
                others.
        """
        if not self.passed:
            raise VerificationError(f"{self.candidate} differs from {self.reference}: {self.reason}")

    @property
    def reason(self) -> str | None:
        """The worst failure and the number of others; None if there is none."""
        if not self.failures:
            return None
        more = f"; and {len(self.failures) - 1} more" if len(self.failures) > 1 else ""
        return self.failures[0] + more

    @property
    def max_abs(self) -> float:
        """Largest difference, of the logits if there are any."""
        return float(np.max([one.max_abs for one in self._main()], initial=0.0))

    @property
    def max_rel(self) -> float:
        """Largest relative error, of the logits if there are any."""
        return float(np.max([one.max_rel for one in self._main()], initial=0.0))

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types."""
        tokens = {} if self.tokens is None else asdict(self.tokens)
        return {
            "reference": self.reference,
            "candidate": self.candidate,
            "passed": self.passed,
            **tokens,
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
            "bar": asdict(self.bars),
            "outputs": {name: one.to_dict() for name, one in self.outputs.items()},
            "interface": list(self.interface),
            "inputs": list(self.inputs),
            "notes": list(self.notes),
            "exact": None if self.exact is None else self.exact.to_dict(),
            "simulated": None if self.simulated is None else asdict(self.simulated),
            "failures": list(self.failures),
        }

    def to_json(self) -> str:
        """Return the report as JSON; NaN and infinity are the strings "nan" and "inf"."""
        return json.dumps(_plain(self.to_dict()), indent=2)

    def text(self) -> str:
        """Return the report as a few lines of text."""
        lines = [f"the candidate {change}" for change in self.interface]
        if self.outputs or self.tokens is not None:
            lines.append(self._outputs_line() if self.tokens is None else self._tokens_line(self.tokens))
        lines += [f"compared on {inputs}" for inputs in self.inputs]
        for name, one in self.outputs.items():
            lines += [f"{name}: {remark}" for remark in _remarks(name, one)]
        lines += self.notes
        if self.exact is not None and self.exact.tokens is not None:
            lines.append(f"with products in float32: {self.exact._tokens_line(self.exact.tokens)}")  # noqa: SLF001
        if self.simulated is not None:
            lines.append(
                f"rounding activations to int8 alone: KL {self.simulated.kl:.2g} at most, "
                f"{self.simulated.mean_kl:.2g} on average; the mean may be {_ROUNDINGS} times as large"
            )
        return "\n".join(lines)

    def _main(self) -> list[OutputResult]:
        logits = [one for one in self.outputs.values() if one.kind == LOGITS]
        return logits or list(self.outputs.values())

    def _tokens_line(self, tokens: TokenResult) -> str:
        text = (
            f"greedy tokens equal: {tokens.greedy_equal} of {tokens.steps}; "
            f"KL {tokens.kl:.2g} at most, {tokens.mean_kl:.2g} on average; "
            f"logits differ by {self.max_abs:.2g} at most"
        )
        caches = {name: one for name, one in self.outputs.items() if one.kind != LOGITS}
        if not caches:
            return text
        worst = _worst(caches)
        return f"{text}; {worst} by {caches[worst].max_rel:.2g} of its range"

    def _outputs_line(self) -> str:
        worst = _worst(self.outputs)
        return f"outputs differ by {self.max_abs:.2g} at most, {self.max_rel:.2g} of the range ({worst})"


def _worst(outputs: Mapping[str, OutputResult]) -> str:
    """Return the name of the output with the largest relative error."""
    return max(outputs, key=lambda name: np.nan_to_num(outputs[name].max_rel, nan=np.inf))


def _remarks(name: str, result: OutputResult) -> list[str]:
    remarks = []
    if result.same_nan:
        remarks.append(
            f"NaN in the same {result.same_nan} of {result.elements} places of both, counted as equal"
        )
    if result.same_infinite:
        remarks.append(f"the same infinity in {result.same_infinite} of {result.elements} places of both")
    if result.constant and not name.endswith(KEYS):
        remarks.append("constant in the reference for all inputs, so its dependence on them was not compared")
    if result.rounding is not None and result.reason is None:
        remarks.append(
            f"a relative error of {result.rounding:.2g} is allowed: it is within 10 times the measured "
            "rounding error of the reference, or within what its dynamic quantization alone changes"
        )
    if result.kind == "exact" and result.mismatches and result.reason is None:
        remarks.append(
            f"{result.mismatches} of {result.elements} elements differ, by {result.max_abs:.3g} at most"
        )
    return remarks


def _plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not support, by strings."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value
