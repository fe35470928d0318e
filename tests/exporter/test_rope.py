"""Every rope type at the sizes and positions of real models, compared with transformers if installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from carryall.exporter.config import rope_config
from carryall.exporter.graph import GraphWriter
from carryall.exporter.rope import rope_tables

MODEL = {
    "vocab_size": 8,
    "hidden_size": 4096,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e6},
    "linear": {"rope_theta": 1e4, "factor": 8.0},
    "llama3": {
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "longrope": {
        "rope_theta": 1e4,
        "original_max_position_embeddings": 4096,
        "short_factor": list(np.linspace(1.0, 1.5, 64)),
        "long_factor": list(np.linspace(1.0, 60.0, 64)),
    },
    "dynamic": {"rope_theta": 1e4, "factor": 2.0},
}


def tables(rope_type: str, positions: npt.NDArray[np.int64], **model: Any) -> npt.NDArray[np.float32]:
    """Compute cosines and sines [2, batch, sequence, half] with ONNX's reference evaluator."""
    from onnx.reference import ReferenceEvaluator

    graph = GraphWriter("rope")
    position_ids = graph.input("position_ids", ir.DataType.INT64, ("batch", "sequence"))
    config = rope_config({**MODEL, **model}, {"rope_type": rope_type, **ROPES[rope_type]})
    for name, value in zip(("cos", "sin"), rope_tables(graph, config, position_ids), strict=True):
        graph.output(value, name, ir.DataType.FLOAT, ("batch", "sequence", config.rotary_dim // 2))
    evaluator = ReferenceEvaluator(ir.to_proto(graph.model()))
    return np.stack(list(evaluator.run(None, {"position_ids": positions})))


@pytest.mark.parametrize("last", [100, 5000, 200_000])
@pytest.mark.parametrize("rope_type", sorted(ROPES))
def test_angles_are_those_of_transformers(rope_type: str, last: int) -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    configuration = pytest.importorskip("transformers.models.llama.configuration_llama")
    parameters = {"rope_type": rope_type, **ROPES[rope_type]}
    embedding = modeling.LlamaRotaryEmbedding(configuration.LlamaConfig(**MODEL, rope_parameters=parameters))
    positions = np.array([[0, 1, last // 2, last]])
    expected = embedding(torch.zeros(1), torch.tensor(positions))
    half = np.stack([value.numpy() for value in expected])[..., :64]
    # float32 angles of thousands of turns: both sides round.
    np.testing.assert_allclose(tables(rope_type, positions), half, rtol=0, atol=max(1e-5, last * 2e-7))


def test_dynamic_equals_default_within_the_trained_context() -> None:
    positions = np.arange(64)[None]
    np.testing.assert_allclose(
        tables("dynamic", positions, max_position_embeddings=64), _plain(positions, 1e4), rtol=0, atol=1e-5
    )
    longer = np.arange(65)[None]
    changed = tables("dynamic", longer, max_position_embeddings=64)
    assert np.abs(changed - _plain(longer, 1e4)).max() > 1e-3


def test_longrope_uses_long_factors_beyond_the_original_context() -> None:
    within, beyond = np.array([[7, 4095]]), np.array([[7, 4096]])
    assert np.abs(tables("longrope", within)[:, :, 0] - tables("longrope", beyond)[:, :, 0]).max() > 0.1


def _plain(positions: npt.NDArray[np.int64], theta: float) -> npt.NDArray[np.float64]:
    angles = positions[..., None] * theta ** (-np.arange(0, 128, 2) / 128)
    return np.stack([np.cos(angles), np.sin(angles)])
