from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, evaluate, graph

from carryall.graph_opt.analysis.token_axes import Axis, Mixed, TokenAxes
from carryall.graph_opt.passes.cache.add_cache import AddCachePass

WIDTH = 8
RNG = np.random.default_rng(0)
GIVEN = {
    "embed": RNG.standard_normal((9, WIDTH)).astype(np.float32),
    "rows": RNG.standard_normal((32, WIDTH)).astype(np.float32),
    "w": RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32),
    "scale": np.ones(WIDTH, np.float32),
    "zero": np.int64(0), "one": np.int64(1), "i1": np.array([1]), "i0": np.array([0]),
    "free": np.float32(0), "low": np.float32(-1e9), "window": np.int64(2),
    "flat": np.array([-1, WIDTH]), "heads": np.array([0, 0, 2, 4]), "end": np.array([2**62]),
    "last": np.array([-1]), "axes": np.array([2]),
}  # fmt: skip
CAUSAL = """s1 = Shape <start = 1> (input_ids) s = Squeeze(s1) keys = Range(zero, s, one)
    queries = Unsqueeze(keys, i1) order = LessOrEqual(keys, queries)"""
ATTENTION = "y = Attention <q_num_heads = 2, kv_num_heads = 2, is_causal = 1> (q, x, x)"
WHOLE = "logits = Add(y, x)"


def decoder(
    attention: str = ATTENTION, before: str = "q = MatMul(x, w)", after: str = WHOLE, extra: str = ""
) -> ir.Model:
    body = f"""e = Gather(embed, input_ids) p = Gather(rows, position_ids) x = Add(e, p)
        {before} {attention} {after}"""
    outputs = f"float[b, s, {WIDTH}] logits{extra}"
    types = "<bool[s, s] seen, float[s, s] mask, float[b, s, 8] y>"
    return graph(
        f"g (int64[b, s] input_ids, int64[b, s] position_ids) => ({outputs}) {types} {{ {body} }}", **GIVEN
    )


def feed(tokens: int, past: int = 0) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    ids = np.random.default_rng(1).integers(0, 9, (2, past + tokens))[:, past:]
    return {"input_ids": ids, "position_ids": np.tile(np.arange(past, past + tokens), (2, 1))}


def in_pieces(model: ir.Model, cuts: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    names = [str(value.name) for value in model.graph.outputs]
    cache = {name: np.zeros((2, 2, 0, 4), np.float32) for name in names[1:]}
    found = []
    for start, stop in zip([0, *cuts], [*cuts, 7], strict=True):
        given: dict[str, Any] = {
            name.replace("present", "past_key_values"): value for name, value in cache.items()
        }
        given |= {key: value[:, : stop - start] for key, value in feed(7 - start, start).items()}
        given["attention_mask"] = np.ones((2, stop), np.int64)
        results = dict(zip(names, evaluate(model, given), strict=True))
        found.append(results.pop("logits"))
        cache = results
    return np.concatenate(found, 1)


MASKED = "y = Attention <q_num_heads = 2, kv_num_heads = 2> (q, x, x, mask)"
WINDOW = f"""{CAUSAL} old = Sub(queries, window) near = Greater(keys, old) seen = And(order, near)
    mask = Where(seen, free, low)"""


@pytest.mark.parametrize(
    ("before", "attention"),
    [
        ("q = MatMul(x, w)", ATTENTION),
        (f"q = MatMul(x, w) {CAUSAL} mask = Where(order, free, low)", MASKED),
        (f"q = MatMul(x, w) {WINDOW}", MASKED),
        ("x2 = Reshape(x, flat) q2 = Gemm(x2, w) sh = Shape(x) q = Reshape(q2, sh)", ATTENTION),
        ("h = Reshape(x, heads) r = Transpose <perm = [0, 2, 1, 3]> (h) g = Sigmoid(r) "
         "t = Transpose <perm = [0, 2, 1, 3]> (g) sh = Shape(x) q = Reshape(t, sh)", ATTENTION),
        ("n = RMSNormalization <axis = -1> (x, scale) a, b = Split <axis = -1, num_outputs = 2> (n) "
         "q = Concat <axis = 2> (b, a)", ATTENTION),
    ],
    ids=["attribute", "mask", "window", "flat rows", "heads", "split"],
)  # fmt: skip
def test_pieces_on_a_cache_are_the_whole(before: str, attention: str) -> None:
    expected = evaluate(decoder(attention, before), feed(7))[0]
    model = decoder(attention, before)
    assert apply(AddCachePass(), model) == []
    names = [str(value.name) for value in model.graph.inputs]
    assert names[2:] == ["past_key_values.0.key", "past_key_values.0.value", "attention_mask"]
    assert [value.name for value in model.graph.outputs] == ["logits", "present.0.key", "present.0.value"]
    for cuts in ([], [4], [1, 2, 5]):
        np.testing.assert_allclose(in_pieces(model, cuts), expected, rtol=1e-5, atol=1e-6)


def test_keys_that_are_returned_already_become_the_cache() -> None:
    after = f"{WHOLE} k4 = Reshape(x, heads) k = Transpose <perm = [0, 2, 1, 3]> (k4)"
    model = decoder(after=after, extra=", float[b, 2, s, 4] k")
    model.graph.outputs[1].name = "present.0.key"
    assert apply(AddCachePass(), model) == []
    assert [value.name for value in model.graph.outputs] == ["logits", "present.0.key", "present.0.value"]
    other = decoder(after=f"{WHOLE} k4 = Reshape(q, heads) k = Transpose <perm = [0, 2, 1, 3]> (k4)",
                    extra=", float[b, 2, s, 4] k")  # fmt: skip
    other.graph.outputs[1].name = "present.0.key"
    assert apply(AddCachePass(), other) == ["the graph output present.0.key is not the key of attention 0"]
    assert len(other.graph.inputs) == 2


UNKNOWN = "the graph has no KV cache, and none can be added: "
MIXES = " mixes tokens, or is not known to process each separately"


@pytest.mark.parametrize(
    ("before", "attention", "after", "reason"),
    [
        ("q = MatMul(x, w)", ATTENTION.replace(", is_causal = 1", ""), WHOLE,
         "it has no mask, so it is not causal"),
        (f"q = MatMul(x, w) {CAUSAL} seen = GreaterOrEqual(keys, queries) mask = Where(seen, free, low)",
         MASKED, WHOLE, "the mask is neither causal nor a sliding window (past 0, new 3)"),
        ("q = MatMul(x, w)", ATTENTION, "c = CumSum(y, one) logits = Add(c, x)",
         f"{UNKNOWN}CumSum is not known to process each token separately"),
        ("q = MatMul(x, w)", ATTENTION, "l = Slice(y, last, end, i1) logits = Add(l, x)",
         f"{UNKNOWN}Slice{MIXES}"),
        ("m = ReduceMean(x, i1) q = Add(x, m)", ATTENTION, WHOLE, f"{UNKNOWN}ReduceMean{MIXES}"),
        ("t = Transpose <perm = [0, 2, 1]> (x) q2 = Softmax(t) q = Transpose <perm = [0, 2, 1]> (q2)",
         ATTENTION, WHOLE, f"{UNKNOWN}Softmax{MIXES}"),
        (f"{CAUSAL} f = Cast <to = 1> (queries) q = Add(x, f)", ATTENTION, WHOLE, f"{UNKNOWN}Add{MIXES}"),
    ],
    ids=["no mask", "looks ahead", "sum", "last token", "mean", "softmax", "counted positions"],
)  # fmt: skip
def test_what_may_look_ahead_or_mixes_tokens_stays(
    before: str, attention: str, after: str, reason: str
) -> None:
    model = decoder(attention, before, after)
    assert apply(AddCachePass(), model) == [reason]
    assert [value.name for value in model.graph.inputs] == ["input_ids", "position_ids"]


def test_rows_of_tokens_are_followed_through_one_axis() -> None:
    model = decoder(before="x2 = Reshape(x, flat) q2 = Gemm(x2, w) sh = Shape(x) q = Reshape(q2, sh)")
    axes = {value.name: axis for value, axis in TokenAxes(model.graph).axes.items()}
    assert axes["x2"] == axes["q2"] == Axis(0, flat=True)
    assert axes["q"] == Axis(1)


def test_a_matrix_for_every_token_is_refused() -> None:
    with pytest.raises(Mixed, match="MatMul mixes tokens"):
        TokenAxes(
            decoder(before="t = Transpose <perm = [0, 2, 1]> (x) s = MatMul(x, t) q = MatMul(s, x)").graph
        )


def test_a_fixed_number_of_tokens_cannot_be_continued() -> None:
    model = decoder()
    for value in model.graph.inputs:
        value.shape = ir.Shape(["b", 7])
    assert apply(AddCachePass(), model) == [
        "the graph accepts exactly 7 tokens, so it cannot generate; export it with a dynamic sequence axis"
    ]
