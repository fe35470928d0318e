"""Medusa (https://arxiv.org/abs/2401.10774): heads that guess several tokens from one hidden state.

Folders are those of text-generation-inference: ``medusa_lm_head.safetensors`` has residual blocks and a
projection for each head. Head k guesses the token k + 2 places behind that of the state.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...contract import HIDDEN_STATES, LOGITS
from ...errors import CheckpointError
from ..graph import GraphWriter
from ..safetensors_files import safetensors_in
from ..weights import Array, Checkpoint
from .kinds import MEDUSA_FILE


def medusa_graph(folder: Path) -> ir.Model:
    """Return the graph of all heads: ``hidden_states`` [rows, hidden] to ``logits`` [rows, heads, vocab].

    Raises:
        CheckpointError: a tensor is missing, unknown, or has a wrong shape.
    """
    checkpoint = Checkpoint(folder, safetensors_in(folder / MEDUSA_FILE))
    counts = checkpoint.layer_counts()
    heads = [str(number) for number in range(len(counts))]
    if not heads or set(counts) != set(heads) or len(set(counts.values())) > 1:
        raise CheckpointError(
            f"{folder / MEDUSA_FILE} does not hold heads 0.* to N.* with as many residual blocks each"
        )
    blocks = counts["0"] - 1
    vocabulary, hidden = checkpoint.shape(f"0.{blocks}.weight")
    net = GraphWriter("medusa")
    states = net.input(HIDDEN_STATES, ir.DataType.FLOAT, ("rows", hidden))
    guesses = []
    for head in heads:
        x = states
        for block in range(blocks):
            with net.scope(f"{head}.{block}.linear"):
                y = _linear(net, checkpoint, x, (hidden, hidden))
                y = net.op("Add", y, net.initializer(checkpoint.tensor(net.qualified("bias"), (hidden,))))
                x = net.op("Add", x, net.op("Mul", y, net.op("Sigmoid", y)))
        with net.scope(f"{head}.{blocks}"):
            logits = _linear(net, checkpoint, x, (vocabulary, hidden))
        guesses.append(net.op("Unsqueeze", logits, net.ints(1)))
    net.output(
        net.op("Concat", *guesses, axis=1), LOGITS, ir.DataType.FLOAT, ("rows", len(heads), vocabulary)
    )
    if unused := checkpoint.unused():
        raise CheckpointError(f"{folder / MEDUSA_FILE} holds the tensor '{unused[0]}', which Medusa has not")
    return net.model()


def _linear(net: GraphWriter, checkpoint: Checkpoint, x: ir.Value, shape: tuple[int, int]) -> ir.Value:
    name = net.qualified("weight")
    weight = checkpoint.tensor(name, shape, view=_transposed)
    return net.op("MatMul", x, net.initializer(weight))


def _transposed(array: Array) -> Array:
    return np.transpose(array)
