from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, evaluate

from carryall.graph_opt.passes.cache.lift_static_cache import LiftStaticCachePass

RNG = np.random.default_rng(0)
EMBED, MIX = (RNG.standard_normal(shape).astype(np.float32) for shape in ((9, 8), (8, 8)))
SCATTER = """ck = TensorScatter <axis = 1> (key_cache, k, write_indices)
    cv = TensorScatter <axis = 1> (value_cache, k, write_indices)"""
ATTENTION = """y = Attention <q_num_heads = 2, kv_num_heads = 2, is_causal = 1>
    (x, ck, cv, , , , nonpad_kv_seqlen)"""


def decoder(scatter: str = SCATTER, attention: str = ATTENTION) -> ir.Model:
    """One layer with a cache of twelve tokens."""
    inputs = """int64[b, s] input_ids, float[b, 12, 8] key_cache, float[b, 12, 8] value_cache,
        int64[b] write_indices, int64[b] nonpad_kv_seqlen"""
    body = f"x = Gather(embed, input_ids) k = MatMul(x, mix) {scatter} {attention} logits = Add(x, y)"
    text = f"g ({inputs}) => (float[b, s, 8] logits, float[b, 12, 8] ck, float[b, 12, 8] cv) {{ {body} }}"
    tensors = [ir.tensor(array, name=name) for name, array in (("embed", EMBED), ("mix", MIX))]
    return ir.from_onnx_text(f'<ir_version: 11, opset_import: ["" : 24]> {text}', initializers=tensors)


def test_steps_on_a_growing_cache_are_those_on_a_fixed_one() -> None:
    fixed, growing = decoder(), decoder()
    assert apply(LiftStaticCachePass(), growing) == []
    names = ["past_key_values.0.key", "past_key_values.0.value"]
    assert [value.name for value in growing.graph.inputs] == ["input_ids", *names]
    assert [value.name for value in growing.graph.outputs] == ["logits", "present.0.key", "present.0.value"]
    ids = np.random.default_rng(1).integers(0, 9, (2, 9))
    caches, pasts = [np.zeros((2, 12, 8), np.float32)] * 2, [np.zeros((2, 2, 0, 4), np.float32)] * 2
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        given = {"input_ids": ids[:, start:stop], "write_indices": np.full(2, start)}
        given |= {"nonpad_kv_seqlen": np.full(2, stop)}
        expected, *caches = evaluate(
            fixed, given | dict(zip(("key_cache", "value_cache"), caches, strict=True))
        )
        found, *pasts = evaluate(
            growing, {"input_ids": ids[:, start:stop]} | dict(zip(names, pasts, strict=True))
        )
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        heads = caches[0][:, :stop].reshape(2, stop, 2, 4).swapaxes(1, 2)
        np.testing.assert_allclose(pasts[0], heads, rtol=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (", , , , nonpad_kv_seqlen", "", "it has no nonpad_kv_seqlen"),
        (", is_causal = 1", "", "its mask is not is_causal alone"),
        ("<axis = 1>", '<axis = 1, mode = "circular">', "are not graph inputs"),
        ("(value_cache, k, write_indices)", "(value_cache, k, nonpad_kv_seqlen)", "are not graph inputs"),
    ],
)
def test_a_cache_that_is_kept_otherwise_stays(old: str, new: str, reason: str) -> None:
    model = decoder(SCATTER.replace(old, new), ATTENTION.replace(old, new))
    refused = apply(LiftStaticCachePass(), model)
    assert len(refused) == 1
    assert reason in refused[0]
    assert len(model.graph.inputs) == 5
