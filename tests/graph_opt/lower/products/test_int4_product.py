"""Products with int4 weights go to carryall's kernel of CUDA exactly where it can read them."""

from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.lower.products.int4_product import Int4ProductPass

HEAD = "g (float16[rows, 64] x) => (float16[rows, 8] y) {"


def weights(scale: type = np.float16, group: int = 32) -> dict[str, np.ndarray]:
    return {
        "w": np.zeros((8, 64 // group, group // 2), np.uint8),
        "s": np.ones((8, 64 // group), scale),
        "z": np.zeros((8, (64 // group + 1) // 2), np.uint8),
        "b": np.zeros(8, scale),
    }


def product(domain: str, group: int = 32, bits: int = 4, inputs: str = "x, w, s") -> str:
    return f"{HEAD} y = {domain}.MatMulNBits<K = 64, N = 8, bits = {bits}, block_size = {group}>({inputs}) }}"


@pytest.mark.parametrize("group", [16, 32, 64])
def test_a_product_of_float16_without_zero_points(group: int) -> None:
    before = graph(product("com.microsoft", group), **weights(group=group))
    assert apply(Int4ProductPass(), before) == []
    assert_same(before, graph(product("carryall", group), **weights(group=group)))


def test_zero_points_bring_memory_for_whole_weights() -> None:
    before = graph(product("com.microsoft", inputs="x, w, s, z"), **weights())
    assert apply(Int4ProductPass(), before) == []
    after = product("carryall", inputs="x, w, s, z").replace(" y = ", " y, whole = ")
    assert_same(before, graph(after, **weights()))


@pytest.mark.parametrize(
    ("changed", "scale", "reason"),
    [
        ({}, np.float32, "float16 only"),
        ({"bits": 8}, np.float16, "4 bits only"),
        ({"group": 8}, np.float16, "does not read 64 weights in blocks of 8"),
        ({"inputs": "x, w, s, s"}, np.float16, "zero points in uint8 only"),
        ({"inputs": "x, w, s, , , b"}, np.float16, "no bias"),
    ],
)
def test_others_are_left_to_onnxruntime(changed: dict[str, object], scale: type, reason: str) -> None:
    text = product("com.microsoft", **changed)  # type: ignore[arg-type]
    group = int(changed.get("group", 32))  # type: ignore[call-overload]
    made, same = (graph(text, **weights(scale, group)) for _ in range(2))
    (refusal,) = apply(Int4ProductPass(), made)
    assert reason in refusal
    assert_same(made, same)
