"""QuantizedExperts in NumPy: one token and one expert after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from half_weight import KINDS, HalfWeight
from quantized_linear_reference import Floats, Weight, quantized_linear, random_weight
from stored_weight import StoredWeight, stored_linear, stored_weight

AnyWeight = Weight | StoredWeight | HalfWeight


@dataclass(frozen=True)
class Experts:
    """A mixture: gate and up [width, hidden] and down [hidden, width] of each expert, and biases or none.

    ``up`` is empty if the experts have no gate: "gate" is then their only projection.
    """

    gate: Sequence[AnyWeight]
    up: Sequence[AnyWeight]
    down: Sequence[AnyWeight]
    biases: list[tuple[Floats, ...]] | None
    per_token: int
    normalize: bool
    alpha: float
    beta: float
    limit: float
    activation: str = "silu"

    def tiles(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Return the weights of all experts as the operator reads them."""
        layers = zip(self.gate, self.up, strict=True) if self.up else zip(self.gate, strict=True)
        first = np.stack([np.concatenate([one.tiles() for one in entering]) for entering in layers])
        return first, np.stack([down.tiles() for down in self.down])

    def stacked_biases(self) -> tuple[Floats | None, Floats | None]:
        """Return the biases as the operator reads them."""
        if self.biases is None:
            return None, None
        missing = -self.gate[0].outputs % 16
        padded = [[np.pad(part, (0, missing)) for part in parts[:-1]] for parts in self.biases]
        return np.stack([np.concatenate(parts) for parts in padded]), np.stack([p[-1] for p in self.biases])


def random_experts(
    rng: np.random.Generator,
    *,
    experts: int,
    hidden: int,
    width: int,
    bits: int = 4,
    block: int = 32,
    offsets: int = 0,
    biased: bool = False,
    activation: str = "silu",
    gated: bool = True,
    half: ir.DataType | None = None,
    **facts: float,
) -> Experts:
    """Return a mixture whose results are about as large as the tokens; ``half`` is the type of floats."""

    def weights(outputs: int, inputs: int) -> Sequence[AnyWeight]:
        if half is not None:
            floats = rng.standard_normal((experts, inputs, outputs)) * inputs**-0.5
            rounded = floats.astype(KINDS[half][0]).astype(np.float32)
            return [HalfWeight(values, half) for values in rounded]
        made = [random_weight(rng, outputs, inputs, bits, block, offsets) for _ in range(experts)]
        for one in made:
            one.scales[...] *= 2.0 ** (3 - bits) * inputs**-0.5
            if one.minima is not None:
                one.minima[...] *= inputs**-0.5
        return made

    def floats(count: int) -> Floats:
        return rng.standard_normal(count).astype(np.float32)

    widths = (width, width, hidden) if gated else (width, hidden)
    biases = [tuple(map(floats, widths)) for _ in range(experts)] if biased else None
    return Experts(
        weights(width, hidden),
        weights(width, hidden) if gated else [],
        weights(hidden, width),
        biases,
        int(facts.get("per_token", 2)),
        bool(facts.get("normalize", True)),
        float(facts.get("alpha", 1.0)),
        float(facts.get("beta", 0.0)),
        float(facts.get("limit", np.inf)),
        activation,
    )


def stored_experts(library: Path, kinds: tuple[str, str], hidden: int, width: int, seed: int) -> Experts:
    """Return a mixture of 5 experts with weights of GGUF types: one into the experts, one out of them."""

    def weights(kind: str, outputs: int, inputs: int, first: int) -> list[StoredWeight]:
        return [stored_weight(library, kind, outputs, inputs, seed + first + index) for index in range(5)]

    gate, up = weights(kinds[0], width, hidden, 0), weights(kinds[0], width, hidden, 5)
    return Experts(gate, up, weights(kinds[1], hidden, width, 10), None, 2, True, 1.0, 0.0, np.inf)


def quantized_experts(
    x: Floats, scores: Floats, mixture: Experts, chosen: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.float64]:
    """Return the result [tokens, hidden] of x [tokens, hidden] with the router's logits [tokens, experts].

    With ``chosen`` experts [tokens, per_token], the scores are their shares.
    """
    if chosen is not None:
        results = [
            [_expert(row[None], mixture, int(expert))[0] for expert in experts]
            for row, experts in zip(x, chosen, strict=True)
        ]
        return np.asarray(np.einsum("tk,tkh->th", scores.astype(np.float64), np.array(results, np.float64)))
    shares = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    if not mixture.normalize:
        shares /= shares.sum(axis=1, keepdims=True)
    result = np.zeros(x.shape)
    for token, row in enumerate(x):
        best = np.argsort(-scores[token], kind="stable")[: mixture.per_token]
        total = shares[token, best].sum() if mixture.normalize else 1.0
        for expert in best:
            result[token] += shares[token, expert] / total * _expert(row[None], mixture, int(expert))[0]
    return result


def _expert(x: Floats, mixture: Experts, index: int) -> Floats:
    biases = (None, None, None) if mixture.biases is None else mixture.biases[index]
    gate = _product(x, mixture.gate[index], biases[0]).astype(np.float64)
    between = _activated(np.minimum(gate, mixture.limit), mixture)
    if mixture.up:
        up = _product(x, mixture.up[index], biases[1]).astype(np.float64)
        between = between * (np.clip(up, -mixture.limit, mixture.limit) + mixture.beta)
    return _product(between.astype(np.float32), mixture.down[index], biases[-1])


def _activated(gate: npt.NDArray[np.float64], mixture: Experts) -> npt.NDArray[np.float64]:
    if mixture.activation == "gelu":
        return np.asarray(gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))))
    if mixture.activation == "relu2":
        return np.square(np.maximum(gate, 0))
    return np.asarray(gate / (1 + np.exp(-mixture.alpha * gate)))


def _product(x: Floats, weight: AnyWeight, bias: Floats | None) -> Floats:
    if isinstance(weight, HalfWeight):
        result = x.astype(np.float64) @ weight.values
        return (result if bias is None else result + bias).astype(np.float32)
    if isinstance(weight, StoredWeight):
        return stored_linear(x, weight, bias).astype(np.float32)
    return quantized_linear(x, weight, bias)
