"""A two-layer slot graph for tests of runners, by the lowered contract, and its NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 4, 2, 8, 2
HIDDEN = HEADS * HEAD_DIM
CONTEXT = 64

Floats = npt.NDArray[np.float32]
_FLOAT = ir.DataType.FLOAT
_INT8_SCALE = 0.08  # of keys and values, whose magnitude stays below 10


def slot_weights(seed: int = 0) -> dict[str, Floats]:
    """Random weights: an embedding and one [hidden, (heads + 2 kv_heads) * head_dim] projection a layer."""
    rng = np.random.default_rng(seed)
    weights = {"embedding": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)}
    for layer in range(LAYERS):
        shape = (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        weights[f"qkv.{layer}"] = (rng.standard_normal(shape) * 0.3).astype(np.float32)
    return weights


def save_slot_model(path: Path, *, context_length: int | None = CONTEXT, kv: ir.DataType = _FLOAT) -> Path:
    """Write the slot graph with ``slot_weights()``; ``kv`` is FLOAT, FLOAT16 or INT8."""
    model = ir.Model(_graph(slot_weights(), kv), ir_version=10)
    if context_length is not None:
        model.metadata_props["context_length"] = str(context_length)
    ir.save(model, path)
    return path


def reference_logits(tokens: npt.ArrayLike) -> Floats:
    """Logits [n, vocab] of a whole sequence, computed without any cache."""
    weights = slot_weights()
    ids = np.asarray(tokens)
    x = weights["embedding"][ids]
    causal = np.tril(np.ones((len(ids), len(ids)), bool))
    for layer in range(LAYERS):
        q, k, v = np.split(x @ weights[f"qkv.{layer}"], [HIDDEN, HIDDEN + KV_HEADS * HEAD_DIM], axis=1)
        out = []
        for head in range(HEADS):
            mine = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            group = head // (HEADS // KV_HEADS)
            theirs = slice(group * HEAD_DIM, (group + 1) * HEAD_DIM)
            scores = np.where(causal, q[:, mine] @ k[:, theirs].T * HEAD_DIM**-0.5, -np.inf)
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            out.append(scores / scores.sum(axis=1, keepdims=True) @ v[:, theirs])
        x = x + np.concatenate(out, axis=1)
    return np.asarray(x @ weights["embedding"].T, np.float32)


def _graph(weights: dict[str, Floats], kv: ir.DataType) -> ir.Graph:
    ids = ir.val("input_ids", ir.DataType.INT64, ["batch", "sequence"])
    lengths = ir.val("seqlens_k", ir.DataType.INT32, ["batch"])
    total = ir.val("total_sequence_length", ir.DataType.INT32, [])
    wanted = ir.val("logits_positions", ir.DataType.INT64, ["batch", "wanted"])
    constants = {name: _constant(name, array) for name, array in weights.items()}
    constants["last"] = _constant("last", np.array([-1]))
    tape = ir.tape.Tape()
    inputs, outputs = [ids, lengths, total, wanted], []
    x = tape.op("Gather", [constants["embedding"], ids])
    for layer in range(LAYERS):
        past = [_cache(f"past_key_values.{layer}.{kind}", kv) for kind in ("key", "value")]
        q, k, v = tape.op_multi_out(
            "Split",
            [tape.op("MatMul", [x, constants[f"qkv.{layer}"]]), _split(constants)],
            {"axis": -1},
            num_outputs=3,
        )
        attended, *present = _attention(tape, [q, k, v, *past, lengths, total], kv, constants)
        for value, kind in zip(present, ("key", "value"), strict=True):
            value.name = f"present.{layer}.{kind}"
            value.dtype, value.shape = kv, past[0].shape
        x = tape.op("Add", [x, attended])
        inputs += past
        outputs += present
    chosen = tape.op("GatherND", [x, tape.op("Unsqueeze", [wanted, constants["last"]])], {"batch_dims": 1})
    logits = tape.op("MatMul", [chosen, tape.op("Transpose", [constants["embedding"]], {"perm": [1, 0]})])
    logits.name, logits.dtype = "logits", ir.DataType.FLOAT
    logits.shape = ir.Shape(["batch", "wanted", len(weights["embedding"])])
    return ir.Graph(
        inputs,
        [logits, *outputs],
        nodes=tape.nodes,
        initializers=list(constants.values()),
        opset_imports={"": 21, "com.microsoft": 1},
        name="slots",
    )


def _attention(
    tape: ir.tape.Tape, operands: list[ir.Value], kv: ir.DataType, constants: dict[str, ir.Value]
) -> Sequence[ir.Value]:
    """GroupQueryAttention on a cache of type ``kv``: attended, present key, present value."""
    attributes: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
    inputs: list[ir.Value | None] = list(operands)
    if kv == ir.DataType.INT8:
        scale = constants.setdefault("kv_scale", _constant("kv_scale", np.array([_INT8_SCALE], np.float32)))
        inputs += [None] * 5 + [scale, scale]
        attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    elif kv != _FLOAT:
        inputs[:3] = [tape.op("Cast", [value], {"to": int(kv)}) for value in operands[:3]]
    attended, *present = tape.op_multi_out(
        "GroupQueryAttention", inputs, attributes, domain="com.microsoft", num_outputs=3
    )
    if kv == ir.DataType.FLOAT16:
        attended = tape.op("Cast", [attended], {"to": int(_FLOAT)})
    return [attended, *present]


def _cache(name: str, kv: ir.DataType) -> ir.Value:
    return ir.val(name, kv, ["batch", KV_HEADS, "max_length", HEAD_DIM])


def _constant(name: str, array: npt.NDArray[Any]) -> ir.Value:
    return ir.Value(name=name, const_value=ir.tensor(array, name=name))


def _split(constants: dict[str, ir.Value]) -> ir.Value:
    sizes = np.array([HIDDEN, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
    return constants.setdefault("sizes", _constant("sizes", sizes))
