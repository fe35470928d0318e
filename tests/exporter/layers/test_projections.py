"""Linear layers that checkpoints store together, compared with the same layers in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from safetensors.numpy import save_file

from carryall.exporter import layers
from carryall.exporter.config import decoder_config
from carryall.exporter.decoder import Decoder
from carryall.exporter.weights import Checkpoint

Array = npt.NDArray[np.float32]

HEADS, KV_HEADS, SIZE, HIDDEN, VOCAB = 6, 2, 4, 24, 5
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
SHAPES = {
    "embed.weight": (VOCAB, HIDDEN),
    "fused.weight": (40, HIDDEN),
    "fused.bias": (40,),
    "turned.weight": (HIDDEN, 40),
    "turned.bias": (40,),
}
IDS = np.array([[3, 1, 4]])


def random(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture
def net(tmp_path: Path) -> Decoder:
    """A decoder whose checkpoint has an embedding, and a fused module with a bias in each of both layouts."""
    tensors = {name: random(*shape, seed=seed) for seed, (name, shape) in enumerate(SHAPES.items())}
    save_file(tensors, tmp_path / "model.safetensors")
    return Decoder(decoder_config(CONFIG), Checkpoint(tmp_path))


def stored(net: Decoder, name: str) -> Array:
    array: Array = net.checkpoint.tensor(name, SHAPES[name]).numpy()
    return array


def computed(net: Decoder, values: list[ir.Value]) -> list[Array]:
    """Run the graph on ``IDS`` in ONNX's reference evaluator."""
    for number, value in enumerate(values):
        net.output(value, f"out_{number}", ir.DataType.FLOAT, ("batch", "sequence", "width"))
    net.graph.inputs[:] = [net.input_ids]
    results = ReferenceEvaluator(ir.to_proto(net.model())).run(None, {"input_ids": IDS})
    return [np.asarray(result) for result in results]


def embedded(net: Decoder) -> tuple[ir.Value, Array]:
    """Return the embedding of ``IDS``, as a value of the graph and in numpy."""
    return layers.embedding(net, "embed"), stored(net, "embed.weight")[IDS]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("module", "stored_in_out"), [("fused", False), ("turned", True)])
def test_the_parts_of_a_fused_layer(net: Decoder, module: str, stored_in_out: bool, bias: bool) -> None:
    x, rows = embedded(net)
    parts = {"q": 24, "k": 6, "v": 10}
    found = layers.split_linear(net, module, parts, x, HIDDEN, bias=bias, stored_in_out=stored_in_out)
    weight = stored(net, f"{module}.weight")
    whole = rows @ (weight if stored_in_out else weight.T) + bias * stored(net, f"{module}.bias")
    expected = np.split(whole, [24, 30], axis=-1)
    for one, other in zip(computed(net, found), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
    assert {"q.weight", "k.weight", "v.weight"} <= set(net.graph.initializers)


@pytest.mark.parametrize("bias", [False, True])
def test_heads_that_are_stored_by_group(net: Decoder, bias: bool) -> None:
    """Each of two groups has three heads of queries, a head of keys and a head of values."""
    x, rows = embedded(net)
    found = layers.grouped_qkv(net, "fused", x, bias=bias)
    whole = rows @ stored(net, "fused.weight").T + bias * stored(net, "fused.bias")
    heads = np.split(whole, 10, axis=-1)
    expected = [
        np.concatenate([heads[number] for number in numbers], axis=-1)
        for numbers in ((0, 1, 2, 5, 6, 7), (3, 8), (4, 9))
    ]
    for one, other in zip(computed(net, list(found)), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)


def test_a_selection_of_outputs(net: Decoder) -> None:
    x, rows = embedded(net)
    found = layers.selected_linear(net, "fused", "last", x, (40, HIDDEN), lambda a: a[:-4:-1], bias=True)
    whole = rows @ stored(net, "fused.weight").T + stored(net, "fused.bias")
    np.testing.assert_allclose(computed(net, [found])[0], whole[..., :-4:-1], rtol=0, atol=2e-6)
