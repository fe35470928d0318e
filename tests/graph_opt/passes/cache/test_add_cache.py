from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, evaluate, graph
from onnx_ir.passes import common

from carryall.graph_opt.analysis.token_axes import Axis, Mixed, TokenAxes
from carryall.graph_opt.experts.write_mixture import ExpertWeights, Routing, write_mixture
from carryall.graph_opt.graph.edit import add_initializer, insert, nodes_of
from carryall.graph_opt.passes.cache.add_cache import AddCachePass
from carryall.graph_opt.passes.fuse.sink_attention import SeparateSinksPass, SinkAttentionPass

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
    "first_two": np.array([0, 1]), "eight": np.array([WIDTH]), "four": np.array([4]),
    "narrow": RNG.standard_normal((WIDTH, 4)).astype(np.float32), "scaling": np.float32(0.6),
    "sinks": np.array([-1, 0.5, 3, 9], np.float32).reshape(1, 4, 1, 1), "twice": np.array([1, 1, 2, 1, 1]),
    "by4": np.array([0, 0, 4, 2]), "by2": np.array([0, 0, 2, 2]), "all_heads": np.array([0, 4, -1, 2]),
    "wide": np.array([0, 0, WIDTH]),
}  # fmt: skip
CAUSAL = """s1 = Shape <start = 1> (input_ids) s = Squeeze(s1) keys = Range(zero, s, one)
    queries = Unsqueeze(keys, i1) order = LessOrEqual(keys, queries)"""
ATTENTION = "y = Attention <q_num_heads = 2, kv_num_heads = 2, is_causal = 1> (q, x, x)"
WHOLE = "logits = Add(y, x)"


def decoder(
    attention: str = ATTENTION,
    before: str = "q = MatMul(x, w)",
    after: str = WHOLE,
    extra: str = "",
    inputs: str = "",
) -> ir.Model:
    body = f"""e = Gather(embed, input_ids) p = Gather(rows, position_ids) x = Add(e, p)
        {before} {attention} {after}"""
    outputs = f"float[b, s, {WIDTH}] logits{extra}"
    types = "<bool[s, s] seen, float[s, s] mask, float[b, s, 8] y>"
    return graph(
        f"g (int64[b, s] input_ids, int64[b, s] position_ids{inputs}) => ({outputs}) {types} {{ {body} }}",
        **GIVEN,
    )


def feed(tokens: int, past: int = 0) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    ids = np.random.default_rng(1).integers(0, 9, (2, past + tokens))[:, past:]
    return {"input_ids": ids, "position_ids": np.tile(np.arange(past, past + tokens), (2, 1))}


def in_pieces(
    model: ir.Model, cuts: list[int], size: int = 4
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    names = [str(value.name) for value in model.graph.outputs]
    cache = {name: np.zeros((2, 2, 0, size), np.float32) for name in names[1:]}
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
def test_pieces_on_a_cache_equal_the_whole(before: str, attention: str) -> None:
    expected = evaluate(decoder(attention, before), feed(7))[0]
    model = decoder(attention, before)
    assert apply(AddCachePass(), model) == []
    names = [str(value.name) for value in model.graph.inputs]
    assert names[2:] == ["past_key_values.0.key", "past_key_values.0.value", "attention_mask"]
    assert [value.name for value in model.graph.outputs] == ["logits", "present.0.key", "present.0.value"]
    for cuts in ([], [4], [1, 2, 5]):
        np.testing.assert_allclose(in_pieces(model, cuts), expected, rtol=1e-5, atol=1e-6)


# transformers' eager attention of gpt-oss, without a cache: 4 query heads of 2, 2 KV heads.
SINKS = """h = Reshape(q, by4) qt = Transpose <perm = [0, 2, 1, 3]> (h)
    y0 = Sigmoid(x) k = MatMul(x, narrow) k4 = Reshape(k, by2) kt = Transpose <perm = [0, 2, 1, 3]> (k4)
    v = MatMul(y0, narrow) v4 = Reshape(v, by2) vt = Transpose <perm = [0, 2, 1, 3]> (v4)
    vu = Unsqueeze(vt, axes) vx = Expand(vu, twice) vh = Reshape(vx, all_heads)
    ku = Unsqueeze(kt, axes) kx = Expand(ku, twice) kh = Reshape(kx, all_heads)
    keys_t = Transpose <perm = [0, 1, 3, 2]> (kh) s0 = MatMul(qt, keys_t) sm = Mul(s0, scaling)
    mask4 = Unsqueeze(mask, first_two) sc = Add(sm, mask4)
    of_ids = Shape(input_ids) b0, n = Split <num_outputs = 2> (of_ids)
    rows_of = Concat <axis = 0> (b0, four, n, i1) spread = Expand(sinks, rows_of)
    joined = Concat <axis = -1> (sc, spread) weights = Softmax <axis = -1> (joined)
    shares = Slice(weights, i0, last, last) o = MatMul(shares, vh) ot = Transpose <perm = [0, 2, 1, 3]> (o)
    y = Reshape(ot, wide)"""


def test_attention_with_sinks_receives_a_cache() -> None:
    before = f"q = MatMul(x, w) {WINDOW}"
    expected = evaluate(decoder(SINKS, before), feed(7))[0]
    model = decoder(SINKS, before)
    common.ShapeInferencePass()(model)
    for one in (SinkAttentionPass(cached=False), AddCachePass(), SeparateSinksPass()):
        one(model)
        assert (one.fired, one.refusals) == (1, [])
    assert not list(nodes_of(model.graph, "Attention"))
    assert [value.name for value in model.graph.outputs] == ["logits", "present.0.key", "present.0.value"]
    for cuts in ([], [4], [1, 2, 5]):
        np.testing.assert_allclose(in_pieces(model, cuts, size=2), expected, rtol=1e-5, atol=1e-6)
    common.ShapeInferencePass()(model)
    lowered = SinkAttentionPass()
    lowered(model)
    assert (lowered.fired, lowered.refusals) == (1, [])  # kernels with sinks take the form that was written


def with_mixture(model: ir.Model) -> ir.Model:
    """Insert a canonical mixture of three experts, two of them per token, in front of the last node."""
    last = model.graph[-1]
    tokens = last.inputs[0]
    assert tokens is not None

    def matrix(name: str, width: int) -> ir.Value:
        content = np.random.default_rng(len(name)).standard_normal((WIDTH, width)).astype(np.float32)
        return add_initializer(model.graph, name, content)

    scores = insert(last, "MatMul", [tokens, matrix("router", 3)]).outputs[0]
    experts = [
        ExpertWeights(*((matrix(f"{'e' * number}.{name}", WIDTH), None) for name in ("g", "up", "down")))
        for number in range(1, 4)
    ]
    last.replace_input_with(0, write_mixture(last, tokens, Routing(scores, 2, True), experts, hidden=WIDTH))
    return model


def test_mixtures_of_experts_process_each_token_separately() -> None:
    expected = evaluate(with_mixture(decoder()), feed(7))[0]
    model = with_mixture(decoder())
    assert apply(AddCachePass(), model) == []
    for cuts in ([], [4], [1, 2, 5]):
        np.testing.assert_allclose(in_pieces(model, cuts), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("source", ["attention_mask", "c"])
def test_lengths_read_from_the_mask_are_those_of_the_tokens(source: str) -> None:
    """Traces without a cache take attention_mask's length for that of input_ids."""
    before = f"""q0 = MatMul(x, w) c = Cast <to = 9> (attention_mask) n = Shape <start = 1> ({source})
        sh = Concat <axis = 0> (i0, n, eight) q = Reshape(q0, sh)"""

    expected = evaluate(decoder(), feed(7))[0]
    model = decoder(before=before, inputs=", int64[b, s] attention_mask")
    assert apply(AddCachePass(), model) == []
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
def test_non_causal_graphs_and_mixed_tokens_stay(
    before: str, attention: str, after: str, reason: str
) -> None:
    model = decoder(attention, before, after)
    assert apply(AddCachePass(), model) == [reason]
    assert [value.name for value in model.graph.inputs] == ["input_ids", "position_ids"]


def test_flattened_tokens_are_tracked() -> None:
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
