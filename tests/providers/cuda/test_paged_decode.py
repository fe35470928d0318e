"""The body of PagedDecode, which the emulator runs, beside NumPy in float64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from cuda_emulator import Emulator, build_emulator

Array = npt.NDArray[Any]
THREADS = 128
TYPES: dict[str, Any] = {
    "half": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "float8": np.dtype(ml_dtypes.float8_e4m3fn),
}


class Sizes(ctypes.Structure):
    """The numbers of a launch: ``Sizes`` of paged_decode.cu."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("heads", "kv_heads", "size", "rotary", "interleaved")),
        *((name, ctypes.c_int) for name in ("block", "width", "window", "splits", "channels")),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "epsilon")),
    ]


@dataclass
class Case:
    """A step of one token a row."""

    past: list[int]
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    rotary: int = 64
    interleaved: bool = False
    norms: bool = False
    sinks: bool = False
    block: int = 16
    window: int = 0
    splits: int = 1
    channels: bool = False
    softcap: float = 0.0
    kind: str = "half"
    cache: str = ""
    arrays: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng, kind = np.random.default_rng(3), TYPES[self.kind]
        rows, width = len(self.past), -(-(max(self.past) + 1) // self.block)
        shape = 1 + rows * width, self.block, self.kv_heads, self.size
        held = TYPES[self.cache or self.kind]
        caches = [
            rng.integers(-128, 128, shape).astype(held)
            if self.cache == "int8"
            else rng.normal(0, 1, shape).astype(held)
            for _ in range(2)
        ]
        scales = (rng.random((2, self.kv_heads * self.size if self.channels else 1)) * 0.02 + 0.01).astype(
            "f"
        )
        longest = max(self.past) + 1
        angles = rng.uniform(0, 6, (longest, self.rotary // 2))
        self.arrays = {
            "packed": rng.normal(0, 1, (rows, (self.heads + 2 * self.kv_heads) * self.size)).astype(kind),
            "keys": caches[0],
            "values": caches[1],
            "past": np.array(self.past, np.int32),
            "table": (1 + rng.permutation(rows * width).reshape(rows, width)).astype(np.int32),
            "cosines": np.cos(angles).astype(kind),
            "sines": np.sin(angles).astype(kind),
            "sinks": rng.normal(0, 1, self.heads).astype(kind),
            "query_norm": rng.uniform(0.5, 1.5, self.size).astype(kind),
            "key_norm": rng.uniform(0.5, 1.5, self.size).astype(kind),
            "key_scales": scales[0],
            "value_scales": scales[1],
        }

    @property
    def quantized(self) -> bool:
        return bool(self.cache)

    def given(self, name: str) -> Array | None:
        """Return an optional operand, None where the case lacks it."""
        lacks = {
            "sinks": not self.sinks,
            "query_norm": not self.norms,
            "key_norm": not self.norms,
            "key_scales": not self.quantized,
            "value_scales": not self.quantized,
            "cosines": not self.rotary,
            "sines": not self.rotary,
        }
        return None if lacks.get(name) else self.arrays[name]


def run(emulator: Emulator, case: Case) -> tuple[Array, Array, Array]:
    """Return the result [rows, heads, size], and both caches after the step."""
    rows = len(case.past)
    group = case.heads // case.kv_heads
    numbers = {
        **{name: int(getattr(case, name)) for name in ("heads", "kv_heads", "size", "rotary", "interleaved")},
        **{name: int(getattr(case, name)) for name in ("block", "window", "splits", "channels")},
        "width": case.arrays["table"].shape[1],
    }
    sizes = Sizes(**numbers, scale=case.size**-0.5, softcap=case.softcap, epsilon=1e-6)
    y = np.zeros((rows, case.heads, case.size), TYPES[case.kind])
    blocks = rows * case.kv_heads * case.splits
    parts = np.full((blocks, group, case.size + 2), np.nan, np.float32)
    keys, values = case.arrays["keys"].copy(), case.arrays["values"].copy()
    optional = ("cosines", "sines", "sinks", "query_norm", "key_norm", "key_scales", "value_scales")
    operands: list[Array | None] = [
        case.arrays["packed"],
        keys,
        values,
        case.arrays["past"],
        case.arrays["table"],
    ]
    operands += [case.given(name) for name in optional]
    name = "_".join(["paged_decode", case.kind, *filter(None, [case.cache]), "2" if group <= 2 else "4"])
    emulator.launch(name, blocks, THREADS, *operands, parts, y, sizes)
    if case.splits > 1:
        joined = parts, case.given("sinks"), case.given("value_scales"), y, sizes
        emulator.launch(f"paged_join_{case.kind}", rows * case.heads, THREADS, *joined)
    return y.astype(np.float64), keys, values


def expected(case: Case) -> tuple[Array, Array, Array]:
    """Return what ``run`` returns, by the definition in float64."""
    wide = {name: array.astype(np.float64) for name, array in case.arrays.items()}
    kind, held = TYPES[case.kind], TYPES[case.cache or case.kind]
    rows, group = len(case.past), case.heads // case.kv_heads
    tokens = wide["packed"].reshape(rows, case.heads + 2 * case.kv_heads, case.size)
    y = np.zeros((rows, case.heads, case.size))
    keys, values = case.arrays["keys"].copy(), case.arrays["values"].copy()
    scales = [
        (array.reshape(-1, case.size if case.channels else 1) if case.quantized else np.ones((1, 1)))
        for array in (wide["key_scales"], wide["value_scales"])
    ]

    def turned(vector: Array, norm: Array, position: int) -> Array:
        if case.norms:
            vector = vector / np.sqrt((vector**2).mean() + 1e-6) * norm
        vector, half = vector.copy(), case.rotary // 2
        low = slice(0, case.rotary, 2) if case.interleaved else slice(0, half)
        high = slice(1, case.rotary, 2) if case.interleaved else slice(half, case.rotary)
        if case.rotary:
            c, s = wide["cosines"][position], wide["sines"][position]
            vector[low], vector[high] = (
                vector[low] * c - vector[high] * s,
                vector[high] * c + vector[low] * s,
            )
        rounded: Array = vector.astype(np.float32).astype(kind).astype(np.float64)
        return rounded

    def stored(vector: Array, scale: Array) -> Array:
        scaled = vector / scale
        kept: Array = (np.clip(np.rint(scaled), -128, 127) if case.cache == "int8" else scaled).astype(held)
        return kept

    for row, position in enumerate(case.past):
        blocks = case.arrays["table"][row]
        place = blocks[position // case.block], position % case.block
        for kv in range(case.kv_heads):
            key_scale, value_scale = (scale[kv % len(scale)] for scale in scales)
            new_key = turned(tokens[row, case.heads + kv], wide["key_norm"], position)
            keys[place][kv] = stored(new_key, key_scale)
            values[place][kv] = stored(tokens[row, case.heads + case.kv_heads + kv], value_scale)
            first = max(0, position + 1 - case.window) if case.window else 0
            seen = [(blocks[p // case.block], p % case.block) for p in range(first, position + 1)]
            history = np.stack([keys[at][kv].astype(np.float64) * key_scale for at in seen])
            contents = np.stack([values[at][kv].astype(np.float64) * value_scale for at in seen])
            for head in range(kv * group, (kv + 1) * group):
                scores = history @ turned(tokens[row, head], wide["query_norm"], position) * case.size**-0.5
                if case.softcap:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                most = scores.max()
                weights = np.exp(scores - most)
                total = weights.sum() + (np.exp(wide["sinks"][head] - most) if case.sinks else 0)
                y[row, head] = weights @ contents / total
    return y, keys, values


CASES = {
    "one row": Case([37]),
    "the first token": Case([0, 3]),
    "several tiles": Case([200, 64, 63], splits=1),
    "split": Case([150, 5, 0], splits=4),
    "split, each part some tiles": Case([299], splits=2, block=64),
    "one head a KV head": Case([20], heads=2),
    "three heads a KV head": Case([70], heads=6, splits=2),
    "four heads a KV head": Case([40], heads=8),
    "heads of 128, norms": Case([90, 17], size=128, rotary=128, norms=True, splits=2),
    "heads of 256, partial rotary": Case([40], size=256, rotary=64),
    "heads of 96": Case([40], size=96, rotary=96),
    "interleaved": Case([33], interleaved=True),
    "without rotary": Case([33], rotary=0),
    "window": Case([100, 7], window=24, splits=3),
    "softcap": Case([50], softcap=5.0),
    "sinks": Case([50, 2], sinks=True),
    "sinks, split": Case([50, 2], sinks=True, splits=3),
    "bfloat16": Case([90], kind="bfloat16", norms=True, splits=2),
    "int8": Case([90, 3], cache="int8", splits=2),
    "int8 by channel": Case([90, 3], cache="int8", channels=True, norms=True),
    "int8, bfloat16": Case([30], kind="bfloat16", cache="int8", heads=8, channels=True, splits=2),
    "fp8": Case([90, 3], cache="float8", splits=2),
    "fp8, bfloat16, by channel": Case([40], kind="bfloat16", cache="float8", heads=8, channels=True),
}


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return build_emulator(tmp_path_factory.mktemp("emulator"))


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_attention_of_a_step_is_that_of_numpy(emulator: Emulator, name: str) -> None:
    case = CASES[name]
    found, definition = run(emulator, case), expected(case)
    epsilon = {"half": 2**-10, "bfloat16": 2**-7}[case.kind]
    bound = epsilon * np.abs(definition[0]) + epsilon * np.abs(definition[0]).max() / 8
    assert np.all(np.abs(found[0] - definition[0]) <= bound)
    for after, exact, before in zip(
        found[1:], definition[1:], (case.arrays["keys"], case.arrays["values"]), strict=True
    ):
        changed = (after != before).any(axis=(2, 3))
        assert changed.sum() == len(case.past)  # one position a row is written
        # Norms and rotary are rounded once from float there, from float64 here.
        near = {"": 1e-3, "int8": 1, "float8": 2e-2}[case.cache]
        np.testing.assert_allclose(after.astype("f"), exact.astype("f"), rtol=2 * epsilon, atol=near)


@pytest.mark.parametrize("splits", [1, 3])
def test_results_are_the_same_bits_in_every_order_of_threads(emulator: Emulator, splits: int) -> None:
    case, results = Case([150, 20], splits=splits, norms=True), []
    for order in (0, 1, 7):
        emulator.order(order)
        results.append(run(emulator, case))
    emulator.order(0)
    for other in results[1:]:
        for one, another in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, another)


@pytest.mark.long
@pytest.mark.parametrize("barrier", [0, 1, 3])
def test_a_missing_barrier_is_found(tmp_path_factory: pytest.TempPathFactory, barrier: int) -> None:
    """Without the barrier behind scores, weights or a sum, results depend on the order."""
    places: list[int] = []

    def without(name: str, text: str) -> str:
        if name != "paged_decode.cu":
            return text
        line = "    __syncthreads();\n"
        parts = text.split(line)
        places.append(len(parts))
        return line.join(parts[: barrier + 1]) + line.join(["", *parts[barrier + 1 :]])[len(line) :]

    broken = build_emulator(tmp_path_factory.mktemp("broken"), without)
    assert places[0] >= 4
    case, results = Case([150, 20], heads=8), []
    for order in range(8):
        broken.order(order)
        results.append(run(broken, case)[0])
    assert any(not np.array_equal(results[0], other) for other in results[1:])
