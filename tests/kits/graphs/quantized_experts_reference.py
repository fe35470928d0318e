"""QuantizedExperts in NumPy: one token and one expert after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from quantized_linear_reference import Floats, Weight, quantized_linear, random_weight
from stored_weight import StoredWeight, stored_linear, stored_weight


@dataclass(frozen=True)
class Experts:
    """A mixture: gate and up [width, hidden] and down [hidden, width] of each expert, and biases or none."""

    gate: Sequence[Weight | StoredWeight]
    up: Sequence[Weight | StoredWeight]
    down: Sequence[Weight | StoredWeight]
    biases: list[tuple[Floats, Floats, Floats]] | None
    per_token: int
    normalize: bool
    alpha: float
    beta: float
    limit: float

    def tiles(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Return the weights of all experts as the operator reads them."""
        pairs = zip(self.gate, self.up, strict=True)
        first = np.stack([np.concatenate([gate.tiles(), up.tiles()]) for gate, up in pairs])
        return first, np.stack([down.tiles() for down in self.down])

    def stacked_biases(self) -> tuple[Floats | None, Floats | None]:
        """Return the biases as the operator reads them."""
        if self.biases is None:
            return None, None
        missing = -self.gate[0].outputs % 16
        padded = [[np.pad(part, (0, missing)) for part in parts[:2]] for parts in self.biases]
        return np.stack([np.concatenate(parts) for parts in padded]), np.stack([p[2] for p in self.biases])


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
    **facts: float,
) -> Experts:
    """Return a mixture whose results are about as large as the tokens."""

    def weights(outputs: int, inputs: int) -> list[Weight]:
        made = [random_weight(rng, outputs, inputs, bits, block, offsets) for _ in range(experts)]
        for one in made:
            one.scales[...] *= 2.0 ** (3 - bits) * inputs**-0.5
            if one.minima is not None:
                one.minima[...] *= inputs**-0.5
        return made

    def floats(count: int) -> Floats:
        return rng.standard_normal(count).astype(np.float32)

    biases = [(floats(width), floats(width), floats(hidden)) for _ in range(experts)] if biased else None
    return Experts(
        weights(width, hidden),
        weights(width, hidden),
        weights(hidden, width),
        biases,
        int(facts.get("per_token", 2)),
        bool(facts.get("normalize", True)),
        float(facts.get("alpha", 1.0)),
        float(facts.get("beta", 0.0)),
        float(facts.get("limit", np.inf)),
    )


def stored_experts(library: Path, kinds: tuple[str, str], hidden: int, width: int, seed: int) -> Experts:
    """Return a mixture of 5 experts with weights of GGUF types: one into the experts, one out of them."""

    def weights(kind: str, outputs: int, inputs: int, first: int) -> list[StoredWeight]:
        return [stored_weight(library, kind, outputs, inputs, seed + first + index) for index in range(5)]

    gate, up = weights(kinds[0], width, hidden, 0), weights(kinds[0], width, hidden, 5)
    return Experts(gate, up, weights(kinds[1], hidden, width, 10), None, 2, True, 1.0, 0.0, np.inf)


def quantized_experts(x: Floats, scores: Floats, mixture: Experts) -> npt.NDArray[np.float64]:
    """Return the result [tokens, hidden] of x [tokens, hidden] with the router's logits [tokens, experts]."""
    shares = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    if not mixture.normalize:
        shares /= shares.sum(axis=1, keepdims=True)
    result = np.zeros(x.shape)
    for token, row in enumerate(x):
        chosen = np.argsort(-scores[token], kind="stable")[: mixture.per_token]
        total = shares[token, chosen].sum() if mixture.normalize else 1.0
        for expert in chosen:
            result[token] += shares[token, expert] / total * _expert(row[None], mixture, int(expert))[0]
    return result


def _expert(x: Floats, mixture: Experts, index: int) -> Floats:
    biases = (None, None, None) if mixture.biases is None else mixture.biases[index]
    gate = _product(x, mixture.gate[index], biases[0]).astype(np.float64)
    up = _product(x, mixture.up[index], biases[1]).astype(np.float64)
    gate, up = np.minimum(gate, mixture.limit), np.clip(up, -mixture.limit, mixture.limit)
    between = gate / (1 + np.exp(-mixture.alpha * gate)) * (up + mixture.beta)
    return _product(between.astype(np.float32), mixture.down[index], biases[2])


def _product(x: Floats, weight: Weight | StoredWeight, bias: Floats | None) -> Floats:
    if isinstance(weight, StoredWeight):
        return stored_linear(x, weight, bias).astype(np.float32)
    return quantized_linear(x, weight, bias)
