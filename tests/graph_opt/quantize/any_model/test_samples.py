"""Calibration samples: files, images, random tensors, and every kind of invalid sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import graph
from PIL import Image

from carryall.errors import UsageError
from carryall.graph_opt.quantize.any_model.images import ImageOptions, read_image
from carryall.graph_opt.quantize.any_model.samples import (
    GeneratedSamplesWarning,
    checked_samples,
    generated_samples,
    read_samples,
)

TWO = graph("g (float[N,3] a, int64[2] b) => (float[N,3] y) { y = Identity(a) }").graph
PICTURE = graph("g (float[N,3,H,W] x) => (float[N,3,H,W] y) { y = Identity(x) }").graph


def good() -> dict[str, Any]:
    return {"a": np.zeros((4, 3), np.float32), "b": np.array([1, 2])}


def write(folder: Path, *contents: dict[str, Any]) -> Path:
    for number, content in enumerate(contents):
        np.savez(folder / f"{number}.npz", **content)
    return folder


def test_a_folder_of_npz_files_is_read_in_order_of_names(tmp_path: Path) -> None:
    contents = [
        {**good(), "a": np.full((1, 3), number, np.float64), "more": np.ones(1)} for number in range(3)
    ]
    found = read_samples(TWO, write(tmp_path, *contents), limit=2)
    assert found.origin == f"2 .npz files of {tmp_path.name}"
    assert [float(feed["a"][0, 0]) for feed in found.feeds] == [0, 1]
    assert {name: content.dtype for name, content in found.feeds[0].items()} == {
        "a": np.float32,
        "b": np.int64,
    }


def test_one_file_is_one_sample(tmp_path: Path) -> None:
    assert len(read_samples(TWO, write(tmp_path, good()) / "0.npz").feeds) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": None}, r"0.npz: input b is missing; it has: a"),
        ({"a": np.zeros((4, 2), np.float32)}, r"input a has shape \[4, 2\], the model needs \['N', 3\]"),
        ({"a": np.zeros(3, np.float32)}, r"input a has shape \[3\]"),
        ({"a": np.full((1, 3), np.nan, np.float32)}, "input a holds NaN or infinity"),
        ({"a": np.full((1, 3), 1e300)}, "input a holds NaN or infinity"),
        ({"b": np.array([0.5, 1])}, "input b has type float64, the model needs int64"),
        ({"a": np.array(["x"])}, "input a has shape"),
    ],
)
def test_invalid_samples_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    content = {name: value for name, value in {**good(), **change}.items() if value is not None}
    with pytest.raises(UsageError, match=message):
        read_samples(TWO, write(tmp_path, content))


def damaged(folder: Path) -> None:
    (folder / "0.npz").write_bytes(b"PK\x03\x04 no archive")


def array_instead(folder: Path) -> None:
    np.save(folder / "0.npy", np.zeros(3))
    (folder / "0.npy").rename(folder / "0.npz")


def pickled(folder: Path) -> None:
    np.savez(folder / "0.npz", **{**good(), "a": np.array([object()])})


def mixed(folder: Path) -> None:
    write(folder, good())
    Image.new("RGB", (4, 4)).save(folder / "0.png")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "holds no calibration samples; supported file types: .npz"),
        (damaged, "0.npz cannot be read as an .npz file"),
        (array_instead, "0.npz cannot be read as an .npz file"),
        (pickled, "0.npz cannot be read as an .npz file"),
        (mixed, "holds .npz files and images"),
    ],
)
def test_invalid_folders_are_refused(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(UsageError, match=message):
        read_samples(TWO, tmp_path)


def test_a_missing_folder_and_no_sample(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the calibration file or folder .* does not exist"):
        read_samples(TWO, tmp_path / "nowhere")
    with pytest.raises(UsageError, match="calibration needs at least one sample"):
        checked_samples(TWO, [])


def test_pixels_are_resized_scaled_and_normalized(tmp_path: Path) -> None:
    Image.new("RGB", (9, 5), (255, 0, 51)).save(tmp_path / "0.png")
    options = ImageOptions(mean=(0.5, 0.25, 0.0), std=(0.5, 1.0, 2.0), size=(4, 6))
    found = read_samples(PICTURE, tmp_path, images=options)
    assert found.feeds[0]["x"].shape == (1, 3, 4, 6)
    assert found.feeds[0]["x"].dtype == np.float32
    np.testing.assert_allclose(found.feeds[0]["x"][0, :, 2, 3], [1.0, -0.25, 0.1], rtol=1e-6)
    assert "3 channels, 4 x 6, NCHW, pixel * 0.00392157 - 0.5/0.25/0, / 0.5/1/2" in found.origin


def test_layout_is_read_from_the_graph_or_given(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), (255, 0, 51)).save(tmp_path / "0.png")
    last = graph("g (uint8[N,8,8,3] x) => (uint8[N,8,8,3] y) { y = Identity(x) }").graph.inputs[0]
    blue_first = read_image(tmp_path / "0.png", last, ImageOptions(scale=1, bgr=True))
    assert blue_first.dtype == np.uint8
    assert blue_first[0, 3, 3].tolist() == [51, 0, 255]
    gray = graph("g (float[1,1,8,8] x) => (float[1,1,8,8] y) { y = Identity(x) }").graph.inputs[0]
    assert read_image(tmp_path / "0.png", gray, ImageOptions(scale=1)).shape == (1, 1, 8, 8)


def test_invalid_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"no image")
    with pytest.raises(UsageError, match=r"0.png cannot be read as an image"):
        read_samples(PICTURE, tmp_path)
    with pytest.raises(UsageError, match="the model's inputs are not one image"):
        read_samples(TWO, tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    with pytest.raises(UsageError, match="mean has 2 numbers for 3 channels; give 1 or 3"):
        read_samples(PICTURE, tmp_path, images=ImageOptions(mean=(1.0, 2.0)))
    wide = graph("g (float[1,7,8,8] x) => (float[1,7,8,8] y) { y = Identity(x) }").graph
    with pytest.raises(UsageError, match="has 7 channels; images have 1, 3 or 4"):
        read_samples(wide, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"layout": "hwc"}, "unknown image layout 'hwc'"), ({"std": (1.0, 0.0)}, "must not be 0")],
)
def test_image_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ImageOptions(**options)


def test_generated_samples_warn_and_are_plausible() -> None:
    both = graph("g (float[N,3,H,W] x, int64[2] mask, bool b) => (bool y) { y = Identity(b) }").graph
    with pytest.warns(GeneratedSamplesWarning, match="no calibration samples were given"):
        found = generated_samples(both, count=2)
    assert found.generated
    first, second = found.feeds
    assert first["x"].shape == (1, 3, 224, 224)
    assert first["x"].min() >= 0
    assert first["x"].max() <= 1
    assert set(first["mask"]) <= {0, 1}
    assert first["b"]
    assert not np.array_equal(first["x"], second["x"])
    with pytest.warns(GeneratedSamplesWarning):
        again = generated_samples(both, count=2)
    np.testing.assert_array_equal(again.feeds[1]["x"], second["x"])


def test_strings_are_not_generated() -> None:
    text = graph("g (string[N] x) => (string[N] y) { y = Identity(x) }").graph
    with (
        pytest.warns(GeneratedSamplesWarning),
        pytest.raises(UsageError, match="no random tensor can be generated"),
    ):
        generated_samples(text)


def test_defaults_need_no_value() -> None:
    one = graph(
        "g (float[2] x, float[2] w) => (float[2] y) { y = Add(x, w) }", w=np.ones(2, np.float32)
    ).graph
    value = one.initializers["w"]
    assert isinstance(value, ir.Value)
    feeds = checked_samples(one, [{"x": np.ones(2)}]).feeds if value.is_graph_input() else [{"x": 1}]
    assert list(feeds[0]) == ["x"]


def test_generated_indices_lie_inside_their_table() -> None:
    table = ir.tensor(np.zeros((2, 4), np.float32), name="t")
    text = '<ir_version: 10, opset_import: ["": 20]> g (int64[1, n] token_type_ids) => (float[1, n, 4] y) '
    model = ir.from_onnx_text(f"{text} {{ y = Gather(t, token_type_ids) }}", initializers=[table])
    with pytest.warns(GeneratedSamplesWarning):
        found = generated_samples(model.graph)
    assert {int(one.max()) for feed in found.feeds for one in feed.values()} == {1}
