"""Bad input: one clear line that names the culprit, and nothing half-written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import write_sharded, write_tiny

from carryall.errors import (
    CarryallError,
    CheckpointError,
    ModelNotFoundError,
    OutputExistsError,
    UnsupportedModelError,
)
from carryall.exporter.export import export_model, export_package
from carryall.exporter.weights import WeightWarning

Tensors = dict[str, npt.NDArray[Any]]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny("llama", tmp_path / "checkpoint")


def edit_weights(folder: Path, edit: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_refused(folder: Path, error: type[CarryallError], *words: str) -> None:
    """Exporting fails with one line that holds ``words``, and leaves nothing behind."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(error) as caught:
        export_package(folder, folder.parent / "package")
    message = str(caught.value)
    assert "\n" not in message
    assert not [word for word in words if word not in message], message
    assert sorted(folder.parent.iterdir()) == before


def test_no_checkpoint(tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent", ModelNotFoundError, "absent", "config.json")


def test_damaged_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"model_type": ')
    assert_refused(checkpoint, CheckpointError, "config.json")


def test_config_without_a_size(checkpoint: Path) -> None:
    edit_config(checkpoint, hidden_size=None)
    assert_refused(checkpoint, CheckpointError, "'hidden_size'", "None")


def test_unknown_family(checkpoint: Path) -> None:
    edit_config(checkpoint, model_type="mamba")
    assert_refused(checkpoint, UnsupportedModelError, "'mamba'", "gemma3_text, gpt2, llama", "--via optimum")


def test_unknown_rope_type(checkpoint: Path) -> None:
    edit_config(checkpoint, rope_parameters={"rope_type": "spiral"})
    assert_refused(checkpoint, UnsupportedModelError, "'spiral'", "llama3", "yarn")


def test_rope_without_its_factor(checkpoint: Path) -> None:
    edit_config(checkpoint, rope_parameters={"rope_type": "linear"})
    assert_refused(checkpoint, CheckpointError, "'linear'", "'factor'")


def test_unknown_activation(checkpoint: Path) -> None:
    edit_config(checkpoint, hidden_act="tanhshrink")
    assert_refused(checkpoint, UnsupportedModelError, "'tanhshrink'", "silu")


def test_unknown_layer_type(tmp_path: Path) -> None:
    folder = write_tiny("qwen3", tmp_path / "checkpoint", layer_types=["full_attention", "linear_attention"])
    assert_refused(folder, UnsupportedModelError, "'linear_attention'")


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert_refused(checkpoint, CheckpointError, "model.safetensors.index.json")


def test_missing_shard(tmp_path: Path) -> None:
    folder = write_sharded("llama", tmp_path / "checkpoint")
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert_refused(folder, CheckpointError, "model-00002-of-00002.safetensors", "missing")


def test_truncated_shard(tmp_path: Path) -> None:
    folder = write_sharded("llama", tmp_path / "checkpoint")
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert_refused(folder, CheckpointError, "model-00001-of-00002.safetensors", "truncated")


def test_missing_tensor(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert_refused(checkpoint, CheckpointError, "'model.layers.1.mlp.up_proj.weight'")


def test_wrong_shape(checkpoint: Path) -> None:
    edit_config(checkpoint, intermediate_size=64)
    assert_refused(
        checkpoint, CheckpointError, "'model.layers.0.mlp.gate_proj.weight'", "[64, 32]", "[48, 32]"
    )


def test_unexpected_dtype(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.update({"model.norm.weight": np.ones(32, np.int8)}))
    assert_refused(checkpoint, CheckpointError, "'model.norm.weight'", "I8", "BF16")


def test_missing_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert_refused(checkpoint, CheckpointError, "tokenizer.json", "AutoTokenizer")


def test_output_folder_that_is_not_empty(checkpoint: Path) -> None:
    out = checkpoint.parent / "package"
    out.mkdir()
    (out / "notes.txt").write_text("keep me")
    assert_refused(checkpoint, OutputExistsError, "package", "not empty")
    assert (out / "notes.txt").read_text() == "keep me"


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_disk_full_while_writing_leaves_nothing_behind(checkpoint: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = sorted(checkpoint.parent.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*package"):
            export_package(checkpoint, checkpoint.parent / "package")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(checkpoint.parent.iterdir()) == before


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_named(checkpoint: Path, value: float) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.k_proj.weight"][3, 5] = value

    edit_weights(checkpoint, spoil)
    with pytest.warns(
        WeightWarning, match=r"'model\.layers\.0\.self_attn\.k_proj\.weight' holds NaN or infinity"
    ):
        export_package(checkpoint, checkpoint.parent / "package")


def test_tensors_without_a_place_are_named(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.update({"model.layers.0.extra": np.ones(1, np.float32)}))
    with pytest.warns(WeightWarning, match=r"1 tensors have no place in a llama: model\.layers\.0\.extra"):
        export_model(checkpoint)
