"""The heads for vectors other than one per text: weights of terms, and a vector or a weight per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...contract import TERM_WEIGHTS, TOKEN_VECTORS, TOKEN_WEIGHTS
from ...errors import CheckpointError, UnsupportedModelError
from ..safetensors_files import safetensors_in
from ..weights import Checkpoint
from .encoder import EncoderWriter
from .modules import pickle_error, splade_pooling

Heads = dict[str, tuple[ir.Value, Sequence[int | str]]]

# Files of BGE-M3 (https://arxiv.org/abs/2402.03216), which publishes them as pickles.
_SPARSE, _MULTI = "sparse_linear", "colbert_linear"
# The head of ColBERT (https://arxiv.org/abs/2004.12832) in checkpoints of its own code.
_COLBERT = "linear.weight"


def vector_heads(net: EncoderWriter, states: ir.Value, vocabulary: Callable[[], ir.Value] | None) -> Heads:
    """Write the heads for sparse and multiple vectors that the folder of a checkpoint has.

    ``term_weights`` [batch, vocabulary] are SPLADE's (https://arxiv.org/abs/2109.10086), ``token_weights``
    [batch, sequence, 1] and ``token_vectors`` [batch, sequence, size], not normalized, those of BGE-M3 and
    ColBERT.

    Args:
        net: the graph to write into.
        states: the last hidden states [batch, sequence, hidden].
        vocabulary: writes logits [batch, sequence, vocabulary] of masked tokens; None for a family without.

    Raises:
        UnsupportedModelError: a head is a pickle, or the family has no logits.
        CheckpointError: a head has the wrong shape.
    """
    heads: Heads = {}
    folder, hidden = net.checkpoint.source, net.config.hidden_size
    pooling = splade_pooling(folder)
    if pooling is not None:
        if vocabulary is None:
            raise UnsupportedModelError(f"SPLADE by model_type '{net.config.model_type}' is not supported")
        heads[TERM_WEIGHTS] = (_terms(net, vocabulary(), *pooling), ("batch", net.config.vocab_size))
    if (linear := _beside(folder, _SPARSE)) is not None:
        weights = net.op("Relu", _linear(net, _SPARSE, linear, states))
        heads[TOKEN_WEIGHTS] = (weights, ("batch", "sequence", 1))
    if (linear := _beside(folder, _MULTI)) is not None:
        size = _rows(linear, "weight", hidden)
        heads[TOKEN_VECTORS] = (_linear(net, _MULTI, linear, states), ("batch", "sequence", size))
    elif _COLBERT in net.checkpoint:
        size = _rows(net.checkpoint, _COLBERT, hidden)
        vectors = net.linear("linear", states, hidden, size, bias=False)
        heads[TOKEN_VECTORS] = (vectors, ("batch", "sequence", size))
    return heads


def _terms(net: EncoderWriter, logits: ir.Value, strategy: str, activation: str) -> ir.Value:
    """Return the largest of, or the sum over, log(1 + relu(logit)) of tokens; twice log(1 + x) if asked."""
    one = net.constant(1, np.float32, "1")
    weights = net.op("Relu", logits)
    for _ in range(2 if activation == "log1p_relu" else 1):
        weights = net.op("Log", net.op("Add", weights, one))
    kept = net.op("Mul", weights, net.real_tokens())  # weights are never negative
    return net.op("ReduceMax" if strategy == "max" else "ReduceSum", kept, net.ints(1), keepdims=0)


def _beside(folder: Path, name: str) -> Checkpoint | None:
    path = folder / f"{name}.safetensors"
    if path.is_file():
        return Checkpoint(path, safetensors_in(path))
    if (folder / f"{name}.pt").is_file():
        raise pickle_error(folder / f"{name}.pt", f"{name}.safetensors")
    return None


def _linear(net: EncoderWriter, name: str, linear: Checkpoint, x: ir.Value) -> ir.Value:
    """Write a linear layer whose weight and bias are the tensors of a file."""
    hidden = net.config.hidden_size
    rows = _rows(linear, "weight", hidden)
    weight = linear.tensor("weight", (rows, hidden), view=lambda array: array.T, new_name=f"{name}.weight")
    y = net.op("MatMul", x, net.initializer(weight))
    return net.op("Add", y, net.initializer(linear.tensor("bias", (rows,), new_name=f"{name}.bias")))


def _rows(checkpoint: Checkpoint, name: str, size: int) -> int:
    shape = checkpoint.shape(name)
    if len(shape) != 2 or shape[1] != size:
        raise CheckpointError(f"{checkpoint.source}: '{name}' is {list(shape)}; expected [rows, {size}]")
    return shape[0]
