"""Weights in files that are links: read where the link stays in the model's folder or in the hub's cache."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

from carryall import InferenceSession
from carryall.cli import carryall
from carryall.errors import GraphError
from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.graph.onnx_files import read_onnx

CONTENT = np.arange(4096, dtype=np.float32)
TEXT = '<ir_version: 10, opset_import: ["" : 21]> g (float[4096] x) => (float[4096] y) { y = Add(x, w) }'
BLOB = "0a1b"


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    graph = ir.from_onnx_text(TEXT, initializers=[ir.tensor(CONTENT, name="w")])
    ir.save(graph, folder / "model.onnx", external_data="model.data", size_threshold_bytes=0)
    return folder / "model.onnx"


def hard_link(tmp_path: Path) -> Path:
    model = write_model(tmp_path / "store" / "package")
    os.link(model.with_name("model.data"), tmp_path / BLOB)
    return model


def hub_cache(tmp_path: Path, folder: str = "") -> Path:
    """Both files are links into ``blobs``, as huggingface_hub stores them."""
    model = write_model(tmp_path / "models--a--b" / "snapshots" / "main" / folder)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    for file in (model, model.with_name("model.data")):
        file.rename(tmp_path / "models--a--b" / "blobs" / f"{BLOB}{file.suffix}")
        target = tmp_path / "models--a--b" / "blobs" / f"{BLOB}{file.suffix}"
        file.symlink_to(os.path.relpath(target, file.parent))
    return model


def in_a_folder_of_the_hub(tmp_path: Path) -> Path:
    return hub_cache(tmp_path, "onnx")


@pytest.mark.parametrize("made", [hard_link, hub_cache, in_a_folder_of_the_hub])
def test_weights_behind_links_are_read(made: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path)  # type: ignore[operator]
    tensor = read_onnx(path).graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    np.testing.assert_array_equal(tensor.numpy(), CONTENT)
    with (tmp_path / "copy").open("wb") as file:
        tensor.tofile(file)
    assert (tmp_path / "copy").read_bytes() == CONTENT.tobytes()
    session = InferenceSession(path)
    np.testing.assert_array_equal(session.run(None, {"x": CONTENT})[0], CONTENT + CONTENT)
    for verb in (["optimize", path, tmp_path / "out.onnx"], ["diff", path, path], ["verify", path, path]):
        done = CliRunner().invoke(carryall, [*map(str, verb)])
        assert done.exit_code == 0, done.output
    monkeypatch.chdir(path.parent)
    assert load_model(Path(path.name)).graph.initializers["w"].const_value is not None


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "package")
    data = path.with_name("model.data")
    data.rename(tmp_path / "elsewhere")
    data.symlink_to("../elsewhere")
    model = load_model(path)
    with pytest.raises(GraphError, match=r"model\.data is a link to .*elsewhere, outside .* replace it"):
        model.graph.initializers["w"].const_value.numpy()  # type: ignore[union-attr]
    done = CliRunner().invoke(carryall, ["diff", str(path), str(path)])
    assert (done.exit_code, done.output.count("\n")) == (1, 1), done.output
