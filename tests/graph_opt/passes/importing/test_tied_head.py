from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, evaluate, graph

from carryall.graph_opt.passes.importing.tied_head import TiedHeadPass

W = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
SIGNATURE = "g (int64[N, S] input_ids) => (float[N, S, 6] logits)"
COPIED = "x = Gather(w, input_ids) logits = MatMul(x, copy)"
TURNED_HEAD = "x = Gather(w, input_ids) t = Transpose <perm = [1, 0]> (w) logits = MatMul(x, t)"
TURNED_TABLE = "t = Transpose <perm = [1, 0]> (copy) x = Gather(t, input_ids) logits = MatMul(x, copy)"


@pytest.mark.parametrize("body", [COPIED, TURNED_HEAD, TURNED_TABLE])
def test_embedding_and_head_share_one_tensor(body: str) -> None:
    model = graph(f"{SIGNATURE} {{ {body} }}", w=W, copy=W.T)
    ids = np.array([[1, 5, 2]])
    expected = evaluate(model, {"input_ids": ids})[0]
    assert apply(TiedHeadPass(), model) == []
    kinds = [node.op_type for node in model.graph]
    assert "Gemm" in kinds
    assert not {"MatMul", "Transpose"} & set(kinds)
    matrices = [v for v in model.graph.initializers.values() if v.const_value and v.const_value.size == 24]
    assert len(matrices) == 1
    np.testing.assert_allclose(evaluate(model, {"input_ids": ids})[0], expected, rtol=1e-6)


def test_a_head_of_its_own_stays() -> None:
    """The head has the embedding's shape and differs in one number of its last row."""
    other = W.T.copy()
    other[-1, -1] += 1
    model = graph(f"{SIGNATURE} {{ {COPIED} }}", w=W, copy=other)
    apply(TiedHeadPass(), model)
    assert [node.op_type for node in model.graph] == ["Gather", "MatMul"]
