"""The graphs of Florence-2 against transformers: tower with the encoder of a text, decoder, in 3 runtimes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from encoder_decoder_kit import RUNTIMES, first_feeds, next_feeds, opened, with_tokens
from florence_golden import GOLDEN, SEED, SIZE, TASKS
from recorded_pictures import picture
from tiny_florence import ROWS, TILE, write_florence

import carryall
from carryall.errors import CheckpointError, UnsupportedModelError
from carryall.exporter.export import export_package
from carryall.exporter.image_processor import read_image_processor
from carryall.exporter.package import MODEL_FILE, TEXT_ENCODER_FILE, VISION_FILE, Package
from carryall.exporter.vision.florence2 import Processor
from carryall.runtime.images import florence2
from carryall.runtime.images.encoding import ImageEncoder
from carryall.runtime.text.tokenizer import Tokenizer

Array = npt.NDArray[Any]
RTOL, ATOL = 1e-5, 3e-5


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("florence2")
    return export_package(write_florence(folder / "checkpoint", SEED), folder / "package").path


@pytest.fixture(scope="module")
def golden() -> dict[str, Array]:
    return dict(np.load(GOLDEN))


def processor_of(package: Path) -> Processor:
    processor = read_image_processor(package / "image_processor.json")
    assert isinstance(processor, Processor)
    return processor


def test_pixels_equal_those_of_transformers(package: Path, golden: dict[str, Array]) -> None:
    processor = processor_of(package)
    assert processor.longest == 128 - ROWS
    (unit,) = florence2.prepare(processor, picture(*SIZE)).units
    patches = florence2.inputs(processor, unit).patches
    np.testing.assert_array_equal(patches.reshape(3, TILE, TILE), golden["pixels"])


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_encoder_equals_transformers(package: Path, golden: dict[str, Array], runtime: str) -> None:
    tower, reader = (opened(package / file, runtime) for file in (VISION_FILE, TEXT_ENCODER_FILE))
    processor, tokenizer = processor_of(package), Tokenizer(package)
    encoder = ImageEncoder(
        processor,
        lambda feeds: tower(feeds)["image_states"],
        read=lambda feeds: reader(feeds)["encoder_hidden_states"],
    )
    for number, task in enumerate(TASKS):
        text = tokenizer.encode(florence2.question(processor, task), add_special_tokens=False)
        states = encoder.read(encoder.prepare(picture(*SIZE)), text)
        np.testing.assert_allclose(states, golden[f"states{number}"], rtol=RTOL, atol=ATOL)
    assert encoder.num_encoded == 1


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_decoder_equals_transformers_at_once_and_in_pieces(
    package: Path, golden: dict[str, Array], runtime: str
) -> None:
    run = opened(package / MODEL_FILE, runtime)
    for number in range(len(TASKS)):
        ids, expected = golden[f"tokens{number}"][None, :-1], golden[f"logits{number}"][None]
        feeds, found = first_feeds(package / MODEL_FILE, golden[f"states{number}"][None]), []
        whole = run(with_tokens(feeds, ids, 0))["logits"]
        np.testing.assert_allclose(whole, expected, rtol=RTOL, atol=ATOL)
        for begin, end in ((0, 1), (1, 2), (2, 9), (9, ids.shape[1])):
            outputs = run(with_tokens(feeds, ids[:, begin:end], begin))
            found.append(outputs["logits"])
            feeds = next_feeds(feeds, outputs)
        np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=RTOL, atol=ATOL)


def test_graphs_are_standard_operators_of_opset_23(package: Path) -> None:
    for name in (MODEL_FILE, VISION_FILE, TEXT_ENCODER_FILE):
        model = onnx.load(package / name, load_external_data=False)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 23)]
    opened_package = Package.open(package)
    assert opened_package.sees
    assert opened_package.record.context_length == 128


def weights_of(graph: Path) -> dict[str, tuple[str, int]]:
    """Return the file and the size of each weight that is in a file."""
    found = {}
    for tensor in onnx.load(graph, load_external_data=False).graph.initializer:
        stored = {entry.key: entry.value for entry in tensor.external_data}
        if stored:
            found[tensor.name] = stored["location"], int(stored["length"])
    return found


def test_the_embedding_is_stored_once(package: Path) -> None:
    decoder, reader = (weights_of(package / file) for file in (MODEL_FILE, TEXT_ENCODER_FILE))
    (name,) = decoder.keys() & reader.keys()
    assert name.endswith("shared.weight")
    assert reader.pop(name) == decoder[name]
    assert {file for file, _ in reader.values()} == {f"{TEXT_ENCODER_FILE}.data"}
    held = (package / f"{TEXT_ENCODER_FILE}.data").stat().st_size
    assert held < decoder[name][1] + sum(size for _, size in reader.values())


def test_the_text_encoder_of_a_quantized_package_reads_as_before(package: Path, tmp_path: Path) -> None:
    out = tmp_path / "quantized"
    carryall.quantize(package, out, "int8-fast")
    feeds = {"image_states": np.ones((2, 32), np.float32), "input_ids": np.array([3, 5, 7])}
    before, after = (opened(folder / TEXT_ENCODER_FILE, "onnxruntime")(feeds) for folder in (package, out))
    np.testing.assert_array_equal(before["encoder_hidden_states"], after["encoder_hidden_states"])


@pytest.mark.parametrize(
    ("file", "changes", "error", "message"),
    [
        ("preprocessor_config.json", {"image_seq_length": 18}, UnsupportedModelError, "has 17 rows here"),
        (
            "preprocessor_config.json",
            {"do_center_crop": True},
            UnsupportedModelError,
            "without 'do_center_crop'",
        ),
        (
            "preprocessor_config.json",
            {"size": {"shortest_edge": 32}},
            UnsupportedModelError,
            "a height and equal",
        ),
        ("config.json", {"vision_config": {"dim_embed": [8]}}, UnsupportedModelError, "code of its own"),
        ("config.json", {"text_config": {"model_type": "t5"}}, UnsupportedModelError, "only bart"),
    ],
)
def test_other_forms_are_refused(
    tmp_path: Path, file: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    source = write_florence(tmp_path / "source")
    content = json.loads((source / file).read_text())
    (source / file).write_text(json.dumps({**content, **changes}))
    with pytest.raises(error, match=message):
        export_package(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stages_that_do_not_fit_a_picture_are_refused(tmp_path: Path) -> None:
    source = write_florence(tmp_path / "source", num_groups=[3, 2])
    with pytest.raises(CheckpointError, match="8 elements, 2 heads and 3 groups do not fit pictures of 32"):
        export_package(source, tmp_path / "out")
