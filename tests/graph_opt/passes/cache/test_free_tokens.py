from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, evaluate, graph

from carryall.graph_opt.passes.cache.free_tokens import FreeTokensPass
from carryall.graph_opt.passes.normalize.canonical_mask import CanonicalMaskPass

RNG = np.random.default_rng(0)
GIVEN = {
    "embed": RNG.standard_normal((9, 8)).astype(np.float32),
    "rows": RNG.standard_normal((32, 8)).astype(np.float32),
    "w": RNG.standard_normal((8, 8)).astype(np.float32),
    "heads": np.array([-1, 1, 2, 4]), "joined": np.array([-1, 1, 8]), "flat": np.array([-1, 8]),
    "i1": np.array([1]),
}  # fmt: skip
HEADS = "h = Reshape(x, heads) g = Sigmoid(h) q = Reshape(g, joined)"
FLAT = "f = Squeeze(x, i1) m = Gemm(f, w) q = Unsqueeze(m, i1)"


def decoder(before: str = HEADS, mask: str = "") -> ir.Model:
    """A decoder for one token at a time, whose only query sees all that is past."""
    inputs = """int64[b, 1] input_ids, int64[b, 1] position_ids, int64[b, t] attention_mask,
        float[b, 2, p, 4] past_key, float[b, 2, p, 4] past_value"""
    body = f"""e = Gather(embed, input_ids) r = Gather(rows, position_ids) x = Add(e, r) {before}
        y, pk, pv = Attention <q_num_heads = 2, kv_num_heads = 2> (q, x, x, {mask}, past_key, past_value)
        logits = Add(y, x)"""
    outputs = "float[b, 1, 8] logits, float[b, 2, t, 4] pk, float[b, 2, t, 4] pv"
    model = graph(f"g ({inputs}) => ({outputs}) {{ {body} }}", **GIVEN)
    for value, kind in zip(model.graph.inputs[-2:], ("key", "value"), strict=True):
        value.name = f"past_key_values.0.{kind}"
    return model


def run(model: ir.Model, cuts: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    ids = np.random.default_rng(1).integers(0, 9, (2, 7))
    cache, found = [np.zeros((2, 2, 0, 4), np.float32)] * 2, []
    for start, stop in zip([0, *cuts], [*cuts, 7], strict=True):
        given: dict[str, Any] = {
            "input_ids": ids[:, start:stop],
            "position_ids": np.tile(np.arange(start, stop), (2, 1)),
            "attention_mask": np.ones((2, stop), np.int64),
            "past_key_values.0.key": cache[0],
            "past_key_values.0.value": cache[1],
        }
        logits, *cache = evaluate(model, given)
        found.append(logits)
    return np.concatenate(found, 1)


@pytest.mark.parametrize("before", [HEADS, FLAT], ids=["heads", "flat rows"])
def test_mrequire_dynamic_sequence_at_once_are_one_after_the_other(before: str) -> None:
    expected = run(decoder(before), [1, 2, 3, 4, 5, 6])
    model = decoder(before)
    assert apply(CanonicalMaskPass(), model) == []
    assert apply(FreeTokensPass(), model) == []
    for name in ("input_ids", "position_ids"):
        value = next(value for value in model.graph.inputs if value.name == name)
        assert str(value.shape) == "[b,sequence]"
    for cuts in ([], [4], [1, 2, 5], [1, 2, 3, 4, 5, 6]):
        np.testing.assert_allclose(run(model, cuts), expected, rtol=1e-5, atol=1e-6)


def test_a_mask_of_unknown_meaning_keeps_the_graph_at_one_token() -> None:
    model = decoder(f"{HEADS} real0 = Cast <to = 1> (attention_mask)", "real0")
    assert apply(FreeTokensPass(), model) == [
        "the graph accepts one token at a time; this has no cache, or an unknown mask"
    ]
    assert str(model.graph.inputs[0].shape) == "[b,1]"


def test_what_mixes_tokens_keeps_the_graph_at_one_token() -> None:
    model = decoder("t = Transpose <perm = [0, 2, 1]> (x) k = MatMul(x, t) q = MatMul(k, x)")
    apply(CanonicalMaskPass(), model)
    assert apply(FreeTokensPass(), model) == [
        "the graph accepts one token at a time, and cannot be changed: MatMul mixes tokens, "
        "or is not known to process each separately"
    ]


def test_a_cache_and_a_fixed_number_of_tokens_stay_and_say_what_to_do() -> None:
    model = decoder()
    for value in model.graph.inputs[:2]:
        value.shape = ir.Shape(["b", 4])
    assert apply(FreeTokensPass(), model) == [
        "the graph accepts exactly 4 tokens, so it cannot generate; export it with a dynamic sequence axis"
    ]
