"""Bad input gives an error of one line that names the object, and leaves no incomplete output."""

from __future__ import annotations

import json
import sys
import time
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
    """Assert that the export fails with one line that holds ``words``, and leaves no file behind."""
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
    assert_refused(
        checkpoint, UnsupportedModelError, "'mamba'", "gemma4_text, gemma4_unified, ", "--via optimum"
    )


@pytest.mark.parametrize("types", [["full_attention"], ["full_attention"] * 9, "full_attention", [1] * 5])
def test_layer_types_that_do_not_name_each_layer(tmp_path: Path, types: object) -> None:
    folder = write_tiny("gemma4_text", tmp_path / "checkpoint")
    edit_config(folder, layer_types=types)
    assert_refused(folder, CheckpointError, "layer_types", "5 layers")


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


def test_missing_index(tmp_path: Path) -> None:
    folder = write_sharded("llama", tmp_path / "checkpoint")
    (folder / "model.safetensors.index.json").unlink()
    assert_refused(folder, CheckpointError, "only model-00001-of-00002.safetensors; add the file")


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
def test_nan_and_infinite_weights_are_named(checkpoint: Path, value: float) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.k_proj.weight"][3, 5] = value

    edit_weights(checkpoint, spoil)
    with pytest.warns(
        WeightWarning, match=r"'model\.layers\.0\.self_attn\.k_proj\.weight' holds NaN or infinity"
    ):
        export_package(checkpoint, checkpoint.parent / "package")


def test_unused_tensors_are_named(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.update({"model.layers.0.extra": np.ones(1, np.float32)}))
    with pytest.warns(WeightWarning, match=r"1 tensors of .* are not used by .*: model\.layers\.0\.extra"):
        export_model(checkpoint)


def test_a_scale_of_a_weight_that_is_not_read_is_refused(checkpoint: Path) -> None:
    """Files of NVFP4 may hold one beside each weight."""
    name = "model.layers.0.self_attn.q_proj.scale"
    edit_weights(checkpoint, lambda tensors: tensors.update({name: np.ones(1, np.float32)}))
    assert_refused(checkpoint, UnsupportedModelError, f"has the scale '{name}', and model_type")


@pytest.mark.parametrize("tied", [False, True])
def test_a_bias_that_the_family_has_not_is_refused_also_beside_a_tied_weight(
    checkpoint: Path, tied: bool
) -> None:
    """ERNIE 4.5 with experts and use_bias has one beside its tied head, which was left out."""
    edit_config(checkpoint, tie_word_embeddings=tied)

    def add(tensors: Tensors) -> None:
        tensors["lm_head.bias"] = np.ones(256, np.float32)
        if tied:
            tensors.pop("lm_head.weight", None)

    edit_weights(checkpoint, add)
    assert_refused(checkpoint, UnsupportedModelError, "has the bias 'lm_head.bias', and model_type")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"num_hidden_layers": 10**9},
            "'num_hidden_layers' must be an integer in [1, 4096], found 1000000000",
        ),
        ({"num_hidden_layers": -3}, "'num_hidden_layers' must be an integer in [1, 4096], found -3"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be an integer in [1, 4096], found 0"),
        ({"num_hidden_layers": 3}, "config.json says 3 layers"),
        ({"num_hidden_layers": 1}, "config.json says 1 layers"),
        ({"num_attention_heads": 0}, "'num_attention_heads' must be an integer in [1, 16384], found 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
        ({"vocab_size": 2**40}, "'vocab_size' must be an integer in [1, 134217728], found 1099511627776"),
        ({"max_position_embeddings": 2**31}, "'max_position_embeddings' must be an integer in [1, 16777216]"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a finite number, found nan"),
        ({"rms_norm_eps": -1}, "'rms_norm_eps' must be a number in [0, 1], found -1"),
        ({"rope_parameters": {"rope_theta": 0}}, "'rope_theta' must be a number in [1, 1e+15], found 0"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}},
            "'rope_theta' must exceed 1 with YaRN",
        ),
        ({"rope_parameters": [1]}, "'rope_parameters' must be an object, found [1]"),
        ({"head_dim": 7, "hidden_size": 28}, "a rotary embedding has 7 of 7 dimensions"),
        ({"hidden_act": ["silu"]}, "'hidden_act' must be a name"),
    ],
)
def test_impossible_configurations_are_refused_before_any_work(
    checkpoint: Path, changes: dict[str, Any], words: str
) -> None:
    edit_config(checkpoint, **changes)
    begin = time.process_time()
    assert_refused(checkpoint, CheckpointError, words)
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', "\0" * 100])
def test_a_broken_tokenizer_is_refused_at_export(checkpoint: Path, content: str) -> None:
    (checkpoint / "tokenizer.json").write_text(content)
    assert_refused(checkpoint, CheckpointError, "the installed tokenizers", "cannot read", "tokenizer.json")


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "C:\\secret", "a/../../secret", "", ".", 5, None, ["x"]]
)
def test_shards_outside_of_the_folder_are_refused(tmp_path: Path, name: object) -> None:
    folder = write_sharded("llama", tmp_path / "checkpoint")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = next(iter(content["weight_map"]))
    content["weight_map"][first] = name
    index.write_text(json.dumps(content))
    assert_refused(
        folder, CheckpointError, "model.safetensors.index.json", repr(name), "outside of its folder"
    )


@pytest.mark.parametrize("sharded", [True, False])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, sharded: bool) -> None:
    folder = (write_sharded if sharded else write_tiny)("llama", tmp_path / "checkpoint")
    shard = next(folder.glob("*.safetensors"))
    shard.rename(tmp_path / "secret")
    shard.symlink_to(tmp_path / "secret")
    assert_refused(folder, CheckpointError, shard.name, "is a link to", "secret", "by a copy")
    (tmp_path / "secret").rename(folder / "real")
    shard.unlink()
    shard.symlink_to("real")  # within the folder
    export_package(folder, tmp_path / "package")


def test_links_within_the_hub_cache_are_allowed(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "models--a--b" / "snapshots" / "0123")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / f"hash of {path.name}")
        path.symlink_to(f"../../blobs/hash of {path.name}")
    package = export_package(folder, tmp_path / "package")
    assert set(package.integrity().values()) == {""}
    assert not any(path.is_symlink() for path in package.path.iterdir())


def test_names_that_occur_twice_are_refused(checkpoint: Path) -> None:
    content = (checkpoint / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip()
    name, facts = list(json.loads(header).items())[-1]
    header = header[:-1] + f', "{name}": {json.dumps(facts)}}}'.encode()
    (checkpoint / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + content[8 + length :]
    )
    assert_refused(checkpoint, CheckpointError, "model.safetensors", "a name occurs twice")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write_sharded("llama", tmp_path / "checkpoint")
    first, second = sorted(folder.glob("model-*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second)
    assert_refused(folder, CheckpointError, name, first.name, second.name)
