"""Do carryall's CUDA kernels compute what onnxruntime's operators compute, on the device at hand?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...contract import DRAW, DRAW_COLUMNS, DRAWN_BEFORE, INPUT_IDS, TOKEN_SOURCES
from ...graph_opt.lower.outputs.draw_tokens import DrawTokensPass
from ...graph_opt.lower.outputs.top_logits import TopLogitsPass
from .kernels import MOST_CANDIDATES

_ROWS, _SIZE, _COUNT = 6, 3000, 64
# Relative errors: the types round once, onnxruntime's operators compute in float.
_TOLERANCES = {"float": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}
_INNER, _COLUMNS, _GROUP = 320, 40, 32  # of a product with int4 weights
# Its rows: without zero points computed by onnxruntime's kernel, by carryall's; with them, by carryall's, by
# onnxruntime's product of whole weights.
_PRODUCTS = {"few": (3, False), "more": (20, False), "pointed": (3, True), "many": (150, True)}
_WIDTHS = {"float": 24, "float16": 25, "bfloat16": 40}  # one of them is no multiple of 16 bytes


def self_test(open_session: Callable[[bytes], Any]) -> str | None:
    """Return which kernel is wrong, None if all are right.

    Args:
        open_session: opens a session on the device, with carryall's operators, of serialized ONNX.
    """
    plain, lowered = (open_session(_graph(own=own)) for own in (False, True))
    names = [value.name for value in plain.get_outputs()]
    feeds = _feeds()
    expected, found = (
        dict(zip(names, session.run(names, feeds), strict=True)) for session in (plain, lowered)
    )
    for name, tolerance in _TOLERANCES.items():
        if not np.allclose(found[name], expected[name], rtol=tolerance, atol=tolerance):
            return f"SiluAndMul in {name} has other results than onnxruntime's operators"
    for name, (_, zeros) in _PRODUCTS.items():
        if not np.allclose(found[name], expected[name], rtol=4e-3, atol=4e-3):
            kind = "with" if zeros else "without"
            rows = f"{len(found[name])} rows"
            return (
                f"MatMulNBits {kind} zero points, {rows} rows, has other results than onnxruntime's operator"
            )
    for name in ("top_logits", "top_token_ids"):
        if not np.array_equal(found[name], expected[name]):
            return f"DrawTokens returns other {name} than onnxruntime's TopK"
    if not np.allclose(found["logsumexp"], expected["logsumexp"], rtol=1e-5):
        return "DrawTokens returns another log-sum-exp than onnxruntime's operators"
    if not np.array_equal(found["drawn_tokens"], expected["drawn_tokens"]):
        return "DrawTokens draws other tokens than onnxruntime's operators"
    return None


def _graph(*, own: bool) -> bytes:
    """Return the graph with carryall's operators, or with onnxruntime's."""
    gates = "".join(_gate(name, own=own) for name in _WIDTHS)
    products = "".join(_product(name, own=own) for name in _PRODUCTS)
    weights = (
        f"uint8[{_COLUMNS}, {_INNER // _GROUP}, {_GROUP // 2}] weights, "
        f"float16[{_COLUMNS}, {_INNER // _GROUP}] scales, uint8[{_COLUMNS}, {_INNER // _GROUP // 2}] zeros"
    )
    rows = ", ".join(f"float16[{rows}, {_INNER}] x_{name}" for name, (rows, _) in _PRODUCTS.items())
    results = ", ".join(f"float16[{rows}, {_COLUMNS}] {name}" for name, (rows, _) in _PRODUCTS.items())
    shape, most = f"{_ROWS}, 1, {_SIZE}", 2 * max(_WIDTHS.values())
    constants = ", ".join(
        f"int64[1] width_{name} = {{{2 * width}}}, int64[2] halves_{name} = {{{width}, {width}}}"
        for name, width in _WIDTHS.items()
    )
    outputs = ", ".join(f"float[{_ROWS}, {width}] {name}" for name, width in _WIDTHS.items())
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "carryall": 1]> g
        (float[{_ROWS}, {most}] gates, float[{shape}] x, int64[tokens, 1] {INPUT_IDS},
         {rows}, {weights})
        => (float[{shape}] logits, int64[tokens, 1] ids, {outputs},
            {results})
        <int64[1] zero = {{0}}, int64[1] last = {{-1}}, {constants}>
        {{ logits = Identity(x) ids = Identity({INPUT_IDS}) {gates} {products} }}"""
    )
    TopLogitsPass(_COUNT, MOST_CANDIDATES if own else 0)(model)
    DrawTokensPass()(model)
    return ir.to_proto(model).SerializeToString()


def _gate(name: str, *, own: bool) -> str:
    """Return the nodes from ``gates`` to the output of a type."""
    rounded = (
        f"x_{name} = Slice(gates, zero, width_{name}, last) "
        f"c_{name} = Cast<to = {int(ir.DataType[name.upper()])}>(x_{name}) "
    )
    if own:
        return f"{rounded} y_{name} = carryall.SiluAndMul(c_{name}) {name} = Cast<to = 1>(y_{name}) "
    return (
        f"{rounded} f_{name} = Cast<to = 1>(c_{name}) "
        f"a_{name}, b_{name} = Split<axis = -1>(f_{name}, halves_{name}) "
        f"s_{name} = com.microsoft.QuickGelu<alpha = 1.0>(a_{name}) {name} = Mul(s_{name}, b_{name}) "
    )


def _product(name: str, *, own: bool) -> str:
    zeros = _PRODUCTS[name][1]
    second = f", whole_{name}" if own and zeros else ""
    return (
        f"{name}{second} = {'carryall' if own else 'com.microsoft'}.MatMulNBits"
        f"<K = {_INNER}, N = {_COLUMNS}, bits = 4, block_size = {_GROUP}>"
        f"(x_{name}, weights, scales{', zeros' if zeros else ''}) "
    )


def _feeds() -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (_ROWS, 1, _SIZE)).astype(np.float32)
    logits[1] = np.round(logits[1])  # many equal ones
    logits[2] = 0
    # Greedy; temperature; top_k; top_p; min_p; all of them. No sum is so near its bound that rounding counts.
    draws = np.array(
        [
            [1.0, 1.0, 2.0, 0.0, 0.0],
            [0.7, 1e9, 0.5, 0.0, 0.31],
            [1.0, 20.0, 2.0, 0.0, 0.52],
            [1.4, 1e9, 0.8, 0.0, 0.37],
            [0.9, 1e9, 2.0, 0.2, 0.63],
            [1.1, 30.0, 0.9, 0.05, 0.11],
        ],
        np.float32,
    ).reshape(_ROWS, len(DRAW_COLUMNS))
    halves = {
        **{f"x_{name}": rng.normal(0, 1, (rows, _INNER)) for name, (rows, _) in _PRODUCTS.items()},
        "scales": rng.uniform(0.001, 0.02, (_COLUMNS, _INNER // _GROUP)),
    }
    return {
        **{name: values.astype(np.float16) for name, values in halves.items()},
        "weights": rng.integers(0, 256, (_COLUMNS, _INNER // _GROUP, _GROUP // 2), np.uint8),
        "zeros": rng.integers(0, 256, (_COLUMNS, _INNER // _GROUP // 2), np.uint8),
        "gates": rng.normal(0, 2, (_ROWS, 2 * max(_WIDTHS.values()))).astype(np.float32),
        "x": logits,
        INPUT_IDS: np.array([[5], [-1]]),
        TOKEN_SOURCES: np.array([[0], [1]]),
        DRAWN_BEFORE: np.arange(4),
        DRAW: draws,
    }
