"""carryall's CUDA kernels: their bodies beside NumPy, and their compilation for every device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zoo
from cuda_emulator import Emulator, bfloat16, build_emulator, from_bfloat16

from carryall.errors import ProviderUnavailableError
from carryall.providers.cuda import kernels
from carryall.providers.cuda.kernels import SOURCES, kernel_images
from carryall.providers.cuda.nvrtc import Nvrtc

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
ORDERS = [0, 1, 7]
THREADS = 512
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return build_emulator(tmp_path_factory.mktemp("emulator"))


def silu_and_mul(x: Array) -> Array:
    gate, value = np.split(x.astype(np.float64), 2, axis=-1)
    product: Array = gate / (1 + np.exp(-gate)) * value
    return product


@pytest.mark.long
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 40), (5, 7), (700, 16)])
@pytest.mark.parametrize("kind", ["float", "half", "bfloat16"])
def test_a_gate_is_that_of_numpy(emulator: Emulator, kind: str, rows: int, width: int) -> None:
    rng = np.random.default_rng(rows)
    x = rng.normal(0, 4, (rows, 2 * width)).astype(np.float32)
    part = 16 // (4 if kind == "float" else 2)
    forms: dict[str, Array] = {"float": x, "half": x.astype(np.float16), "bfloat16": bfloat16(x)}
    stored = forms[kind]
    y: Array = np.zeros((rows, width), stored.dtype)
    sizes = ctypes.c_longlong(rows), ctypes.c_longlong(width), ctypes.c_int(width % part == 0)
    emulator.launch(f"silu_and_mul_{kind}", 3, 64, stored, y, *sizes)
    read: Array = from_bfloat16(stored) if kind == "bfloat16" else stored
    found: Array = from_bfloat16(y) if kind == "bfloat16" else y
    epsilon = {"float": 2**-21, "half": 2**-10, "bfloat16": 2**-7}[kind]
    np.testing.assert_allclose(found.astype(np.float64), silu_and_mul(read), rtol=epsilon, atol=6e-8)


def drawn(
    emulator: Emulator, logits: Array, count: int, controls: Array | None = None
) -> tuple[Array, Array, Array, Array]:
    """Return values and tokens [rows, count], totals [rows] and drawn tokens [rows]."""
    rows, size = logits.shape
    values, tokens = np.full((rows, count), np.nan, np.float32), np.full((rows, count), -1, np.int64)
    totals, chosen = np.full(rows, np.nan, np.float32), np.full(rows, -1, np.int64)
    sizes = ctypes.c_int(size), ctypes.c_int(count)
    results = values, tokens, totals, None if controls is None else chosen
    emulator.launch("draw_tokens", rows, THREADS, logits, controls, *sizes, *results)
    return values, tokens, totals, chosen


def spread(rng: np.random.Generator, size: int) -> Array:
    """Return logits whose largest lie 512 apart, so that one thread has many of them."""
    logits = rng.normal(0, 1, size).astype(np.float32)
    logits[np.arange(size) % THREADS < 32] += 50
    return logits


LOGITS: dict[str, Callable[[np.random.Generator], Array]] = {
    "normal": lambda rng: rng.normal(0, 4, (3, 3000)).astype(np.float32),
    "fewer than threads": lambda rng: rng.normal(0, 4, (2, 300)).astype(np.float32),
    "many equal": lambda rng: rng.integers(-3, 3, (2, 5000)).astype(np.float32),
    "all equal": lambda rng: np.full((1, 2000), -1.5, np.float32),
    "zeros of both signs": lambda rng: np.where(rng.random((1, 900)) < 0.5, -0.0, 0.0).astype(np.float32),
    "with infinities": lambda rng: np.where(rng.random((1, 700)) < 0.4, -np.inf, 1).astype(np.float32),
    "largest 512 apart": lambda rng: np.stack([spread(rng, 512 * 60 + 5) for _ in range(2)]),
}


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 64, 256])
@pytest.mark.parametrize("name", LOGITS)
def test_the_largest_logits_are_those_of_a_stable_sort(emulator: Emulator, name: str, count: int) -> None:
    logits = LOGITS[name](np.random.default_rng(count))
    values, tokens, totals, _ = drawn(emulator, logits, count)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, axis=1))
    exact = np.logaddexp.reduce(logits.astype(np.float64), axis=1)
    np.testing.assert_allclose(totals, exact, rtol=1e-6, atol=1e-6)


def expected_token(logits: Array, controls: Array, count: int) -> int:
    """Return the token that the definition of ``graph_opt/lower/outputs/draw_tokens.py`` draws."""
    inverse, top_k, top_p, min_p, uniform = controls.astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) * inverse)
    among = np.arange(len(weights)) < min(top_k, count)
    total = weights[among].sum() if top_k <= count else weights.sum()
    chosen = np.where(among, weights, 0)
    kept = np.where((np.cumsum(chosen) - chosen < top_p * total) & (weights >= min_p), chosen, 0)
    mass = total if kept[count - 1] else kept.sum()
    place = int((np.cumsum(kept) <= uniform * mass).sum())
    return int(order[min(place, count - 1)])


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
def test_drawn_tokens_are_those_of_the_definition(emulator: Emulator, order: int) -> None:
    rng = np.random.default_rng(5)
    rows, count = 40, 64
    logits = rng.normal(0, 3, (rows, 800)).astype(np.float32)
    columns = [
        1 / rng.uniform(0.3, 1.5, rows),
        rng.choice([1, 5, 40, 64, 1e9], rows),
        rng.uniform(0.1, 1.1, rows),
        rng.choice([0, 0.05, 0.3], rows),
        rng.random(rows),
    ]
    controls = np.stack(columns, axis=1).astype(np.float32)
    controls[0] = [1, 1, 2, 0, 0]  # greedy
    emulator.order(order)
    try:
        *_, tokens = drawn(emulator, logits, count, controls)
    finally:
        emulator.order(0)
    expected = [expected_token(*pair, count) for pair in zip(logits, controls, strict=True)]
    assert tokens.tolist() == expected


@pytest.mark.long
def test_results_are_the_same_bits_in_every_order_of_threads(emulator: Emulator) -> None:
    logits = np.random.default_rng(2).normal(0, 3, (2, 4000)).astype(np.float32)
    controls = np.array([[0.8, 1e9, 0.9, 0, 0.4]] * 2, np.float32)
    results = []
    for order in ORDERS:
        emulator.order(order)
        results.append(drawn(emulator, logits, 64, controls))
    emulator.order(0)
    for other in results[1:]:
        for one, another in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, another)


@pytest.mark.long
def test_a_missing_barrier_is_found(tmp_path: Path) -> None:
    """The emulator must be able to fail: without a barrier of its sum, the kernel depends on the order."""
    line = "    __syncthreads();\n    if (static_cast<int>(threadIdx.x) < half)"

    def without(name: str, text: str) -> str:
        assert name != "draw_tokens.cu" or line in text
        return text.replace(line, line.replace("__syncthreads();", ""))

    broken = build_emulator(tmp_path, without)
    logits = np.random.default_rng(2).normal(0, 3, (1, 4000)).astype(np.float32)
    totals = []
    for order in ORDERS:
        broken.order(order)
        totals.append(float(drawn(broken, logits, 64)[2][0]))
    assert len(set(totals)) > 1


@pytest.mark.long
def test_a_barrier_that_some_threads_leave_out_is_an_error(tmp_path: Path) -> None:
    def diverging(name: str, text: str) -> str:
        return text.replace("  if (threadIdx.x == 0) *counter = 0;\n", "  if (threadIdx.x == 0) return 0;\n")

    broken = build_emulator(tmp_path, diverging)
    with pytest.raises(RuntimeError, match="threads of a block wait at different barriers"):
        drawn(broken, np.ones((1, 600), np.float32), 8)


def packed(values: Array) -> Array:
    """Return two values a byte along the last axis, the first one in the lower half; 0 beside an odd one."""
    values = np.pad(values, ((0, 0), (0, values.shape[1] % 2)))
    both: Array = (values[:, ::2] | values[:, 1::2] << 4).astype(np.uint8)
    return both


def dequantized(weights: Array, scales: Array, zeros: Array) -> Array:
    """Return weights [columns, inner] of blocks with scales and zero points, rounded to half."""
    group = weights.shape[1] // scales.shape[1]
    steps = weights - zeros.repeat(group, axis=1)
    whole: Array = (steps * scales.astype(np.float32).repeat(group, axis=1)).astype(np.float16)
    return whole


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "columns", "inner", "group", "most"),
    [
        (1, 24, 256, 32, 16),
        (16, 17, 96, 32, 16),
        (17, 24, 256, 32, 32),
        (32, 16, 1152, 128, 32),
        (33, 40, 96, 32, 64),
        (64, 8, 2080, 16, 64),
        (100, 17, 512, 256, 128),
        (128, 48, 160, 16, 128),
    ],
)
@pytest.mark.parametrize("own", [False, True], ids=["symmetric", "zero points"])
def test_an_int4_product_is_that_of_numpy(
    emulator: Emulator, rows: int, columns: int, inner: int, group: int, most: int, own: bool
) -> None:
    rng = np.random.default_rng(inner)
    x = rng.normal(0, 1, (rows, inner)).astype(np.float16)
    weights = rng.integers(0, 16, (columns, inner))
    scales = (rng.random((columns, inner // group)) * 0.02 + 0.001).astype(np.float16)
    zeros = rng.integers(0, 16, scales.shape) if own else np.full(scales.shape, 8)
    exact = dequantized(weights, scales, zeros)
    expected = x.astype(np.float64) @ exact.astype(np.float64).T
    y = np.full((rows + 1, columns), np.nan, np.float16)
    sizes = [ctypes.c_int(size) for size in (rows, columns, inner, group)]
    across = {16: 16, 32: 32, 64: 64, 128: 64}[most]
    operands = x, packed(weights), scales, packed(zeros) if own else None, y
    emulator.launch(f"int4_product_{most}", -(-columns // across), 256, *operands, *sizes)
    magnitude = np.abs(x).astype(np.float64) @ np.abs(exact).astype(np.float64).T
    bound = 2**-11 * np.abs(expected) + inner * 2**-23 * magnitude
    assert np.all(np.abs(y[:rows] - expected) <= bound)
    assert np.isnan(y[rows]).all()  # nothing behind the rows


@pytest.mark.parametrize("own", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize(("columns", "inner", "group"), [(5, 96, 32), (17, 256, 16), (3, 512, 256)])
def test_int4_weights_are_those_of_numpy(
    emulator: Emulator, columns: int, inner: int, group: int, own: bool
) -> None:
    rng = np.random.default_rng(inner)
    weights = rng.integers(0, 16, (columns, inner))
    scales = (rng.random((columns, inner // group)) * 0.02 + 0.001).astype(np.float16)
    zeros = rng.integers(0, 16, scales.shape) if own else np.full(scales.shape, 8)
    whole = np.full((columns + 1, inner), np.nan, np.float16)
    sizes = ctypes.c_longlong(columns), ctypes.c_int(inner), ctypes.c_int(group)
    operands = packed(weights), scales, packed(zeros) if own else None, whole
    emulator.launch("int4_weights", 2, 64, *operands, *sizes)
    np.testing.assert_array_equal(whole[:columns], dequantized(weights, scales, zeros))
    assert np.isnan(whole[columns]).all()


def test_the_part_of_a_rank_lies_among_zeros(emulator: Emulator) -> None:
    x, y = np.arange(1, 16, dtype=np.float32).reshape(3, 5), np.full((3, 12), np.nan, np.float32)
    sizes = [ctypes.c_longlong(size) for size in (3, 5, 12, 4)]
    emulator.launch("spread_part", 2, 32, x, y, *sizes)
    expected = np.zeros((3, 12), np.float32)
    expected[:, 4:9] = x
    np.testing.assert_array_equal(y, expected)


@pytest.fixture(scope="module")
def compiler() -> Nvrtc:
    """NVRTC, which needs neither a device nor a driver."""
    folder = zoo.folder() / "nvrtc-13"
    if not folder.is_dir():
        try:
            zoo.install("nvidia-cuda-nvrtc>=13,<14", folder)
        except zoo.ZooError as error:
            pytest.skip(str(error))
    return Nvrtc(ctypes.CDLL(str(next(folder.rglob("libnvrtc.so.13")))))


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_for_every_device(
    compiler: Nvrtc, capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path))
    images = kernel_images(compiler, capability)
    assert len(images) == len(list(SOURCES.glob("*.cu")))
    for path, image in zip(sorted(SOURCES.glob("*.cu")), images, strict=True):
        assert image[:4] == b"\x7fELF"
        for line in path.read_text().splitlines():
            if line.startswith('extern "C" __global__'):
                assert line.split("(")[0].split()[-1].encode() + b"\0" in image


@pytest.mark.slow
def test_the_cache_is_used_and_a_damaged_entry_is_made_again(
    compiler: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path))
    expected = kernel_images(compiler, (9, 0))
    calls: list[str] = []
    compile_source = Nvrtc.compile

    def counted(self: Nvrtc, source: str, name: str, *rest: Any) -> bytes:
        calls.append(name)
        return compile_source(self, source, name, *rest)

    monkeypatch.setattr(Nvrtc, "compile", counted)
    assert kernel_images(compiler, (9, 0)) == expected
    assert calls == []
    (damaged,) = (tmp_path / "cuda-kernels").glob("draw_tokens-*")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert kernel_images(compiler, (9, 0)) == expected
    assert calls == ["draw_tokens.cu"]


@pytest.mark.slow
def test_what_cannot_be_compiled_is_an_error_with_the_compilers_message(compiler: Nvrtc) -> None:
    with pytest.raises(ProviderUnavailableError, match=r"cannot compile broken.cu for sm_90: broken.cu\(1\)"):
        compiler.compile("__global__ void f() { undefined(); }", "broken.cu", {}, (9, 0))


def test_without_the_operators_the_reason_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_library", lambda: None)
    with pytest.raises(ProviderUnavailableError, match="operators are not built; build them with"):
        kernels.operators_library()
