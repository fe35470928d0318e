"""Small graphs with random weights: an encoder, a binary head, a convolutional network."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

HIDDEN, HEADS, VOCABULARY, POSITIONS, LABELS = 16, 4, 50, 32, 10
Weights = dict[str, npt.NDArray[np.generic]]

_EMBEDDING = """
    shape = Shape(input_ids)
    length = Gather(shape, one)
    places = Range(zero, length, one)
    words = Gather(word_table, input_ids)
    position = Gather(position_table, places)
    kinds = Gather(type_table, token_type_ids)
    sum1 = Add(words, position)
    sum2 = Add(sum1, kinds)
    h0 = LayerNormalization<axis = -1, epsilon = 0.00001>(sum2, norm_w, norm_b)
    wide = Cast<to = 1>(attention_mask)
    hidden4 = Unsqueeze(wide, middle_axes)
    kept = Sub(one_f, hidden4)
    mask = Mul(kept, lowest)
"""
_LAYER = """
    qL = MatMul(hI, q_wL)
    kL = MatMul(hI, k_wL)
    vL = MatMul(hI, v_wL)
    qbL = Add(qL, q_bL)
    q4L = Reshape(qbL, split)
    k4L = Reshape(kL, split)
    v4L = Reshape(vL, split)
    qtL = Transpose<perm = [0, 2, 1, 3]>(q4L)
    ktL = Transpose<perm = [0, 2, 3, 1]>(k4L)
    vtL = Transpose<perm = [0, 2, 1, 3]>(v4L)
    sL = MatMul(qtL, ktL)
    ssL = Div(sL, root)
    smL = Add(ssL, mask)
    pL = Softmax<axis = -1>(smL)
    cL = MatMul(pL, vtL)
    ctL = Transpose<perm = [0, 2, 1, 3]>(cL)
    crL = Reshape(ctL, join)
    oL = MatMul(crL, o_wL)
    rL = Add(hI, oL)
    nL = LayerNormalization<axis = -1, epsilon = 0.00001>(rL, n_wL, n_bL)
    uL = MatMul(nL, u_wL)
    ubL = Add(uL, u_bL)
    edL = Div(ubL, root2)
    erL = Erf(edL)
    e1L = Add(erL, one_f)
    emL = Mul(ubL, e1L)
    gL = Mul(emL, half)
    dL = MatMul(gL, d_wL)
    r2L = Add(nL, dL)
    hJ = LayerNormalization<axis = -1, epsilon = 0.00001>(r2L, f_wL, f_bL)
"""
_CNN = """<ir_version: 10, opset_import: ["": 20]>
cnn (float[batch, 3, height, width] pixel_values) => (float[batch, 10] scores) {
    c1 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(pixel_values, c1_w, c1_b)
    b1 = BatchNormalization<epsilon = 0.001>(c1, b1_s, b1_b, b1_m, b1_v)
    r1 = Relu(b1)
    m1 = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r1)
    c2 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]>(m1, c2_w)
    b2 = BatchNormalization<epsilon = 0.001>(c2, b2_s, b2_b, b2_m, b2_v)
    r2 = Clip(b2, low, high)
    c3 = Conv<kernel_shape = [1, 1]>(r2, c3_w, c3_b)
    skip = Add(r2, c3)
    a1 = AveragePool<kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1>(skip)
    gate = Sigmoid(a1)
    swish = Mul(a1, gate)
    pooled = GlobalAveragePool(swish)
    flat = Flatten<axis = 1>(pooled)
    dense = Gemm<transB = 1, alpha = 1.0, beta = 1.0>(flat, g_w, g_b)
    scores = Softmax<axis = -1>(dense)
}"""


def encoder(seed: int = 0, layers: int = 2) -> ir.Model:
    """Return an encoder as exporters write it: decomposed attention and GELU, an additive mask."""
    return _encoder(
        seed, layers, "float[batch, sequence, 16] last_hidden_state", "last_hidden_state = Identity(hX)"
    )


def binary_head(seed: int = 1, layers: int = 2) -> ir.Model:
    """Return a reranker: the encoder, pooling of the first token, and one output column ``logits``."""
    tail = """
    first = Gather<axis = 1>(hX, zero)
    pool = MatMul(first, p_w)
    pooled = Tanh(pool)
    logits = Gemm(pooled, l_w, l_b)
    """
    return _encoder(seed, layers, "float[batch, 1] logits", tail)


def cnn(seed: int = 2) -> ir.Model:
    """Return a CNN with batch normalisation, a residual, swish and a softmax."""
    rng = np.random.default_rng(seed)
    weights: Weights = {
        "c1_w": _random(rng, 8, 3, 3, 3) * 2, "c1_b": _random(rng, 8), "c2_w": _random(rng, 12, 8, 3, 3) * 2,
        "c3_w": _random(rng, 12, 12, 1, 1) * 2, "c3_b": _random(rng, 12),
        "low": np.array(0, np.float32), "high": np.array(6, np.float32),
        "g_w": _random(rng, LABELS, 12) * 6, "g_b": _random(rng, LABELS),
    }  # fmt: skip
    for name, size in (("b1", 8), ("b2", 12)):
        weights |= {f"{name}_s": 1 + _random(rng, size), f"{name}_b": _random(rng, size)}
        weights |= {f"{name}_m": _random(rng, size), f"{name}_v": 0.5 + rng.random(size, np.float32)}
    return _model(_CNN, weights)


def _encoder(seed: int, layers: int, output: str, tail: str) -> ir.Model:
    rng = np.random.default_rng(seed)
    weights: Weights = {
        "zero": np.array(0), "one": np.array(1), "one_f": np.array(1, np.float32),
        "half": np.array(0.5, np.float32), "lowest": np.array(-10000, np.float32),
        "middle_axes": np.array([1, 2]), "root": np.array(2, np.float32),
        "root2": np.array(2**0.5, np.float32),
        "split": np.array([0, 0, HEADS, HIDDEN // HEADS]), "join": np.array([0, 0, HIDDEN]),
        "word_table": 3 * _random(rng, VOCABULARY, HIDDEN), "type_table": 3 * _random(rng, 2, HIDDEN),
        "position_table": 3 * _random(rng, POSITIONS, HIDDEN),
        "norm_w": 1 + _random(rng, HIDDEN), "norm_b": _random(rng, HIDDEN),
        "p_w": _random(rng, HIDDEN, HIDDEN), "l_w": _random(rng, HIDDEN, 1), "l_b": _random(rng, 1),
    }  # fmt: skip
    body = _EMBEDDING
    for layer in range(layers):
        text = re.sub(r"\b(\w+)L\b", rf"\g<1>{layer}", _LAYER)
        body += text.replace("hI", f"h{layer}").replace("hJ", f"h{layer + 1}")
        weights |= {f"{name}_w{layer}": _random(rng, HIDDEN, HIDDEN) for name in "qkvo"}
        weights |= {f"u_w{layer}": _random(rng, HIDDEN, 32), f"d_w{layer}": _random(rng, 32, HIDDEN)}
        weights |= {f"q_b{layer}": _random(rng, HIDDEN), f"u_b{layer}": _random(rng, 32)}
        for norm in "nf":
            weights |= {
                f"{norm}_w{layer}": 1 + _random(rng, HIDDEN),
                f"{norm}_b{layer}": _random(rng, HIDDEN),
            }
    inputs = ", ".join(
        f"int64[batch, sequence] {name}" for name in ("input_ids", "attention_mask", "token_type_ids")
    )
    head = f'<ir_version: 10, opset_import: ["": 20]> encoder ({inputs}) => ({output})'
    return _model(f"{head} {{ {body} {tail.replace('hX', f'h{layers}')} }}", weights)


def _model(text: str, weights: Weights) -> ir.Model:
    words = set(re.findall(r"\w+", text))
    tensors = [ir.tensor(array, name=name) for name, array in weights.items() if name in words]
    return ir.from_onnx_text(text, initializers=tensors)


def _random(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    return rng.standard_normal(shape, np.float32) * np.float32(0.3)
