"""Rotating the residual stream: exact weights by an independent oracle, equal logits, and clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.compare.runners import PortableRunner
from carryall.graph_opt.quantize.algorithms.rotate import RotatePass
from carryall.graph_opt.quantize.algorithms.rotation import Rotation
from carryall.graph_opt.quantize.formats.integer_products import quantize_columns

SIZES = (1, 2, 6, 32, 45, 192, 576, 640)


@pytest.mark.parametrize("size", SIZES)
def test_a_rotation_is_orthogonal_and_spreads_each_channel(size: int) -> None:
    matrix = Rotation(size).rotated(np.eye(size))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-12)
    assert np.abs(matrix).max() <= np.sqrt(2 / size) + 1e-12 or size == 1


def test_a_rotation_is_the_product_of_signs_and_known_factors() -> None:
    """SciPy's documentation defines the orthonormal DCT-II; Sylvester's matrix is (-1)^popcount(i & j)."""
    rotation, power = Rotation(3 * 128), np.arange(128)
    hadamard = np.array([[(-1.0) ** (int(i) & int(j)).bit_count() for j in power] for i in power])
    angle = np.pi * (2 * np.arange(3)[:, None] + 1) * np.arange(3) / 6
    cosines = np.cos(angle) * np.sqrt([1 / 3, 2 / 3, 2 / 3])
    expected = rotation.signs[:, None] * np.kron(cosines, hadamard / np.sqrt(128))
    np.testing.assert_allclose(rotation.rotated(np.eye(384)), expected, atol=1e-12)
    assert set(rotation.signs) == {-1.0, 1.0}


def content(model: ir.Model, name: str) -> np.ndarray:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


def exported(family: str, folder: Path, **overrides: Any) -> ir.Model:
    return export_model(write_tiny(family, folder, **overrides))


def vary_gains(model: ir.Model) -> None:
    """Give every norm's gain different values, which tiny checkpoints may lack."""
    for node in model.graph:
        gain = node.inputs[1] if node.op_type == "RMSNormalization" else None
        if gain is not None and gain.const_value is not None:
            shape = gain.const_value.shape.numpy()
            values = np.random.default_rng(len(str(gain.name))).uniform(0.5, 2, shape).astype(np.float32)
            gain.const_value = ir.tensor(values, name=gain.name)


def save(model: ir.Model, path: Path) -> Path:
    ir.save(model, path, external_data=f"{path.name}.data")
    return path


@pytest.mark.parametrize(("family", "size"), [("llama", 48), ("qwen2", 32), ("qwen3", 48), ("phi3", 32)])
def test_logits_stay_equal(family: str, size: int, tmp_path: Path) -> None:
    """qwen2 has biases, qwen3 norms of heads; both have heads tied to the embedding."""
    model = exported(family, tmp_path / "checkpoint", hidden_size=size)
    vary_gains(model)
    plain = save(model, tmp_path / "plain.onnx")
    turned = ir.load(plain)
    rotate = RotatePass()
    rotate(turned)
    assert (rotate.fired, rotate.refusals) == (1, [])
    tokens = np.random.default_rng(1).integers(0, 256, 40)
    expected, found = (
        PortableRunner(path).forward({0: tokens})[0]
        for path in (plain, save(turned, tmp_path / "turned.onnx"))
    )
    np.testing.assert_allclose(found, expected, atol=2e-5 * float(np.abs(expected).max()))


def test_every_weight_equals_the_dense_formula(tmp_path: Path) -> None:
    model = exported("qwen3", tmp_path / "checkpoint", hidden_size=48)
    vary_gains(model)
    layer, names = "model.layers.1.", model.graph.initializers
    parts = {name: content(model, name).astype(np.float64) for name in names if name.startswith("model.")}
    turn = Rotation(48).rotated(np.eye(48))
    RotatePass()(model)
    gain = np.diag(parts[f"{layer}input_layernorm.weight"])
    expected = {
        "model.embed_tokens.weight": parts["model.embed_tokens.weight"] @ turn,
        f"{layer}self_attn.v_proj.weight": turn.T @ gain @ parts[f"{layer}self_attn.v_proj.weight"],
        f"{layer}self_attn.o_proj.weight": parts[f"{layer}self_attn.o_proj.weight"] @ turn,
        f"{layer}mlp.down_proj.weight": parts[f"{layer}mlp.down_proj.weight"] @ turn,
        "rotate.head.weight": turn.T @ np.diag(parts["model.norm.weight"]) @ turn,
    }
    for name, matrix in expected.items():
        np.testing.assert_allclose(content(model, name), matrix, rtol=1e-6, atol=1e-7, err_msg=name)
    assert not any("layernorm" in name for name in model.graph.initializers)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt2", "Gather writes transformer.wpe/Gather"),
        ("gemma3_text", "RMSNormalization writes model.layers.0.post_attention_layernorm/RMSNormalization"),
        ("mixtral", "Reshape writes model.layers.0.block_sparse_moe/Reshape_3"),
    ],
)
def test_other_streams_are_refused_and_stay_as_they_are(family: str, reason: str, tmp_path: Path) -> None:
    model = exported(family, tmp_path / "checkpoint")
    before = {name: content(model, name).tobytes() for name in model.graph.initializers}
    rotate = RotatePass()
    rotate(model)
    assert rotate.fired == 0
    assert [one.reason for one in rotate.refusals] == [f"the residual stream is not rotated: {reason}"]
    assert before == {name: content(model, name).tobytes() for name in model.graph.initializers}


def test_rounding_activations_with_a_large_channel_loses_less() -> None:
    """Rounding to 8 bits with one scale per row; the large channel has 60 times the size of the others."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(64, 192)).astype(np.float32)
    x[:, 7] *= 60
    rotation = Rotation(192)

    def error(rows: np.ndarray) -> float:
        levels, scales = quantize_columns(np.ascontiguousarray(rows.T))
        return float(np.linalg.norm((levels * scales).T - rows))

    assert error(rotation.after(x)) < 0.2 * error(x)
