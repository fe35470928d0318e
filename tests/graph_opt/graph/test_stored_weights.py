"""Weights that are not stored as the graph says are found before any of them is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from carryall.errors import GraphError
from carryall.graph_opt.graph.load import load_model

TEXT = '<ir_version: 10, opset_import: ["" : 20]> net (float[4] x) => (float[4] y) { y = Add(x, w) }'


def saved(folder: Path, **stated: str) -> Path:
    """Write a model whose weight lies in net.data, and state something else about it."""
    model = ir.from_onnx_text(TEXT, initializers=[ir.tensor(np.ones(4, np.float32), name="w")])
    path = folder / "net.onnx"
    ir.save(model, path, external_data="net.data", size_threshold_bytes=0)
    proto = onnx.ModelProto.FromString(path.read_bytes())
    for entry in proto.graph.initializer[0].external_data:
        entry.value = stated.get(entry.key, entry.value)
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.mark.parametrize(
    "location",
    ["../net.data", "/etc/passwd", "a/../../net.data", "..\\net.data", "C:\\net.data", "C:net.data"],
)
def test_no_file_outside_of_the_folder_is_read(location: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = saved(tmp_path / "model", location=location)
    (tmp_path / "net.data").write_bytes(bytes(16))
    with pytest.raises(GraphError, match=r"stores weight w in .*, outside of its own folder"):
        load_model(path)


def test_a_link_in_the_folder_is_followed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (tmp_path / "net.data").rename(tmp_path / "blob")
    (tmp_path / "net.data").symlink_to(tmp_path / "blob")
    assert load_model(path).graph.initializers["w"].const_value is not None


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"length": "8"}, r"w has 8 bytes in .*net.data; FLOAT of shape \[4\] needs 16"),
        ({"offset": "-4"}, "offset must be non-negative"),
        ({"offset": "four"}, "invalid literal"),
    ],
)
def test_what_is_said_about_a_file_must_fit(stated: dict[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=reason):
        load_model(saved(tmp_path, **stated))


@pytest.mark.parametrize(
    ("dims", "raw", "reason"),
    [
        ([4], b"abc", r"weight w has 3 bytes; FLOAT of shape \[4\] needs 16"),
        ([2**40, 2**40], bytes(16), "weight w has 16 bytes"),
        ([-4], bytes(16), r"weight w has the invalid shape \[-4\]"),
    ],
)
def test_inline_weights_match_their_shape(dims: list[int], raw: bytes, reason: str, tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(TEXT)
    proto.graph.initializer.append(onnx.TensorProto(name="w", data_type=1, dims=dims, raw_data=raw))
    (tmp_path / "net.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(GraphError, match=reason):
        load_model(tmp_path / "net.onnx")


def test_two_inputs_of_one_name(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(TEXT.replace("float[4] x)", "float[4] x, float[4] w)"))
    proto.graph.input[1].name = "x"
    proto.graph.node[0].input[1] = "x"
    (tmp_path / "net.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(GraphError, match="two inputs named x"):
        load_model(tmp_path / "net.onnx")
