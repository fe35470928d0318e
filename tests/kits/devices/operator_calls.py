"""Random calls of the CPU kernels' operators, with what NumPy says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from half_weight import HalfWeight
from operator_host import Call
from paged_attention_reference import BFLOAT16, FLOAT32, INT8, INT8_TOLERANCE, Case, attention, random_case
from quantized_experts_reference import Experts, quantized_experts, random_experts
from quantized_linear_reference import Weight, grouped_weight, quantized_linear, random_weight
from stored_weight import StoredWeight

from carryall.graph_opt.lower.chain.program import (
    ABSENT,
    ADD,
    ATTENTION,
    GATE,
    LINEAR,
    NORM,
    PART,
    VERSION,
    float_bits,
)
from carryall.graph_opt.lower.chain.steps import ATTENTION_SIZES
from carryall.graph_opt.lower.products.tiles import LAYOUT

ALONE = {"rank": 0, "ranks": 0}  # attributes of operators that no other rank shares


@dataclass
class Known:
    """A call, its first result by NumPy, the tolerance relative to the largest value, and more results."""

    call: Call
    expected: npt.NDArray[Any]
    tolerance: float
    more: Sequence[npt.NDArray[Any]] = ()

    def check(self, found: Sequence[npt.NDArray[np.float32]]) -> None:
        """Compare the outputs with the expected ones."""
        for one, expected in zip(found, [self.expected, *self.more], strict=True):
            absolute = self.tolerance * np.abs(expected).max()
            np.testing.assert_allclose(one, expected, rtol=self.tolerance, atol=absolute)


def linear_attributes(weight: Weight | HalfWeight | StoredWeight) -> dict[str, int | float]:
    """Return the attributes of a product with a weight."""
    sizes = {"inputs": weight.inputs, "outputs": weight.outputs, "bits": weight.bits}
    blocks = {"block_size": weight.block, "group_size": weight.group_size, "offsets": weight.offsets}
    return {"layout": LAYOUT, **sizes, **blocks}


def random_linear(rng: np.random.Generator, **options: Any) -> Known:
    """Return a product of up to 40 rows."""
    bits, block = int(rng.choice([4, 8])), int(rng.choice([16, 32, 64, 128, 256]))
    outputs, inputs = int(rng.integers(1, 70)), 2 * int(rng.integers(1, 200))
    weight = random_weight(rng, outputs, inputs, bits, block, int(rng.integers(0, 3)))
    if bits == 4 and block <= 64 and rng.random() < 0.5:
        weight = grouped_weight(rng, outputs, inputs, block, 128, int(rng.integers(0, 2)))
    x = rng.standard_normal((int(rng.integers(1, 40)), inputs)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32) if rng.random() < 0.5 else None
    call = Call("QuantizedLinear", linear_attributes(weight), [x, weight.tiles(), bias], **options)
    return Known(call, quantized_linear(x, weight, bias), 1e-6)


def random_rows(rng: np.random.Generator, **options: Any) -> Known:
    """Return rows of an embedding."""
    weight = random_weight(rng, 50, 96, int(rng.choice([4, 8])), 32, int(rng.integers(0, 3)))
    ids = rng.integers(0, 50, (2, 7))
    call = Call("QuantizedRows", linear_attributes(weight), [ids, weight.tiles()], **options)
    return Known(call, weight.floats()[ids], 1e-6)


def attention_attributes(case: Case) -> dict[str, int | float]:
    """Return the attributes of an attention."""
    return {
        "layout": 2,
        "num_heads": case.heads,
        "kv_num_heads": case.kv_heads,
        "head_size": case.size,
        "block_size": case.block,
        "window": case.window,
        "rotary_dim": case.rotary,
        "interleaved": case.interleaved,
        "cache_type": case.cache,
        "reads_only": 0,
        "scale": float(case.scale),
        "softcap": float(case.softcap),
    }


def attention_inputs(case: Case, rng: np.random.Generator) -> list[npt.NDArray[Any] | None]:
    """Return the inputs of an attention, its blocks in a random order between unused ones."""
    needed = [-(-length // case.block) for length in case.lengths]
    order = rng.permutation(sum(needed) + 2).astype(np.int32)
    table = np.full((len(needed), max(needed)), -1, np.int32)
    for row, count in enumerate(needed):
        table[row, :count] = order[sum(needed[:row]) : sum(needed[: row + 1])]
    cache = np.full((len(order), case.kv_heads, case.block, case.row_bytes), 0xFF, np.uint8)
    tables: list[npt.NDArray[Any] | None] = [cache, cache, case.begins, np.array(case.past, np.int32), table]
    angles = [None, None, None] if case.angles is None else [*case.angles, case.positions]
    new = [case.query, case.new_rows(case.keys), case.new_rows(case.values)]
    return [*new, *tables, *angles, case.sinks, case.slopes, case.ahead]


def random_attention(rng: np.random.Generator, **options: Any) -> Known:
    """Return prompts of several rows, of any size and type of the cache."""
    size, heads = int(rng.integers(1, 129)), [(6, 2), (1, 1), (20, 1), (3, 3)][int(rng.integers(0, 4))]
    lengths = [int(rng.choice([1, 7, 40, 300])) for _ in range(int(rng.integers(1, 4)))]
    facts: dict[str, Any] = {
        "rotary": 2 * int(rng.integers(0, size // 2 + 1)),
        "sinks": bool(rng.integers(0, 2)),
        "slopes": bool(rng.integers(0, 2)),
        "ahead": bool(rng.integers(0, 2)),
        "block": 16 * int(rng.integers(1, 5)),
        "window": int(rng.choice([0, 1, 100])),
        "softcap": float(rng.choice([0, 20])),
        "interleaved": int(rng.integers(0, 2)),
        "cache": int(rng.integers(0, 3)),
    }
    case = random_case(rng, heads=heads, size=size, lengths=lengths, past=[0] * len(lengths), **facts)
    call = Call("PagedAttention", attention_attributes(case), attention_inputs(case, rng), **options)
    # Rounding to int8 or bfloat16 may go the other way after a rotation in float32.
    rotated = {FLOAT32: 6e-6, BFLOAT16: 2e-2, INT8: 4e-2}
    exact = {FLOAT32: 6e-6, BFLOAT16: 6e-6, INT8: INT8_TOLERANCE}
    tolerance = (rotated if case.rotary else exact)[case.cache]
    return Known(call, attention(case), tolerance)


def experts_attributes(mixture: Experts) -> dict[str, int | float]:
    """Return the attributes of a mixture of experts."""
    facts, out = linear_attributes(mixture.gate[0]), linear_attributes(mixture.down[0])
    hidden, width = int(facts.pop("inputs")), int(facts.pop("outputs"))
    return {
        **facts,
        **{f"out_{name}": out[name] for name in ("bits", "block_size", "group_size", "offsets")},
        "num_experts": len(mixture.gate),
        "per_token": mixture.per_token,
        "normalize": int(mixture.normalize),
        "hidden": hidden,
        "width": width,
        "inputs": width,
        "outputs": hidden,
        **ALONE,
        "number": 0,
        "activation": ("silu", "gelu", "relu2").index(mixture.activation),
        "gated": int(bool(mixture.up)),
        "alpha": mixture.alpha,
        "beta": mixture.beta,
        "limit": mixture.limit,
    }


def random_mixture(rng: np.random.Generator, **options: Any) -> Known:
    """Return a mixture of up to 8 experts for up to 60 tokens."""
    experts = int(rng.integers(1, 9))
    sizes: dict[str, Any] = {
        "experts": experts,
        "hidden": 2 * int(rng.integers(1, 60)),
        "width": 2 * int(rng.integers(1, 50)),
    }
    facts: dict[str, Any] = {
        "per_token": int(rng.integers(1, experts + 1)),
        "normalize": int(rng.integers(0, 2)),
        "alpha": float(rng.choice([1.0, 1.5])),
        "beta": float(rng.choice([0.0, 1.0])),
        "limit": float(rng.choice([np.inf, 1.0])),
    }
    activation = str(rng.choice(["silu", "silu", "gelu", "relu2"]))
    gated = bool(rng.integers(0, 4))
    if activation != "silu" or not gated:
        facts |= {"alpha": 1.0, "beta": 0.0, "limit": np.inf}
    weights: dict[str, Any] = {
        "activation": activation,
        "gated": gated,
        "bits": int(rng.choice([4, 8])),
        "block": int(rng.choice([16, 32, 128])),
        "offsets": int(rng.integers(0, 3)),
        "half": [None, None, ir.DataType.FLOAT16, ir.DataType.BFLOAT16][int(rng.integers(0, 4))],
    }
    mixture = random_experts(rng, **sizes, **weights, **facts, biased=bool(rng.integers(0, 2)))
    tokens = int(rng.choice([1, 2, 9, 60]))
    x = rng.standard_normal((tokens, sizes["hidden"])).astype(np.float32)
    scores, chosen = rng.standard_normal((tokens, experts)).astype(np.float32), None
    if rng.integers(0, 2):  # other nodes have chosen, in any order, and one expert twice
        chosen = rng.integers(0, experts, (tokens, mixture.per_token))
        scores = scores[:, : mixture.per_token].copy()
    inputs = [x, scores, *mixture.tiles(), *mixture.stacked_biases(), chosen]
    call = Call("QuantizedExperts", experts_attributes(mixture), inputs, **options)
    # What is between the products may be rounded to int8 the other way: 1 of 127 of one input of the second.
    return Known(call, quantized_experts(x, scores, mixture, chosen), 1e-3)


def random_chain(rng: np.random.Generator, **options: Any) -> Known:
    """Return a product and an attention, their sum, a norm of its heads and a gate, as one chain."""
    lengths = [int(rng.choice([1, 3, 40])) for _ in range(int(rng.integers(1, 4)))]
    case = random_case(
        rng, heads=(4, 2), size=24, lengths=lengths, past=[0] * len(lengths), rotary=0, cache=FLOAT32
    )
    width, tokens = 4 * 24, sum(lengths)
    weight = random_weight(rng, width, 64, 8, 32, 0)
    x = rng.standard_normal((tokens, 64)).astype(np.float32)
    scale, bias = (rng.standard_normal(size).astype(np.float32) for size in (24, width))
    attended = attention_inputs(case, rng)
    inputs = [x, weight.tiles(), scale, bias, *attended[:8]]
    facts = attention_attributes(case)
    sizes = [int(facts[name]) for name in ATTENTION_SIZES]
    floats = [float_bits(float(facts[name])) for name in ("scale", "softcap")]
    steps = [
        *(LINEAR, -3, 0, 1, ABSENT, 64, width, 8, 32, 0, 0),
        *(ATTENTION, -4, *range(4, 12), *[ABSENT] * 6, *sizes, *floats, 0),
        *(ADD, -1, -3, -4, 3),
        *(NORM, -3, -1, 2, float_bits(1e-3)),
        *(PART, -5, -3, 16),
        *(GATE, -2, -5),
    ]
    program = np.array([VERSION, LAYOUT, 2, 0, 5, 2, 6, width, 32, width, width, -64, *steps], np.int64)
    total = quantized_linear(x, weight, None) + attention(case) + bias
    heads = total.astype(np.float64).reshape(tokens, 4, 24)
    normed = (heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + 1e-3) * scale).reshape(tokens, width)
    gate, up = normed[:, 16:48], normed[:, 48:80]
    call = Call("Chain", ALONE, [program, *inputs], **options)
    return Known(call, total, 6e-6, [gate / (1 + np.exp(-gate)) * up])


MAKERS = {
    "chain": random_chain,
    "linear": random_linear,
    "rows": random_rows,
    "attention": random_attention,
    "experts": random_mixture,
}
