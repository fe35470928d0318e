"""The lowered graph of an encoder is cached by content, and so is the reason of one that keeps its form."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_encoders import write_case

import carryall
from carryall.providers import get_provider
from carryall.providers.native.library import ISA_VARIABLE, PORTABLE, kernel_library
from carryall.runtime.api.text_session import JoinedTexts, PaddedTexts, Tokens, open_texts
from carryall.runtime.models.text_graph import Unlowered, text_graph

TEXTS = [Tokens(ids, [0] * len(ids), [], [], []) for ids in ([3, 4, 5, 6, 7], [9], [200, 100, 8])]


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if not get_provider("cpu").lowers_texts():
        pytest.skip("needs carryall's CPU kernels")


def exported(folder: Path, case: str) -> Path:
    carryall.export(write_case(folder / "source", case), folder / "out")
    return folder / "out" / "model.onnx"


def test_a_graph_is_lowered_once_until_it_changes(tmp_path: Path) -> None:
    model = exported(tmp_path, "bert")
    first = text_graph(model, get_provider("cpu"), None)
    assert isinstance(first, Path)
    made = first.stat().st_mtime_ns
    assert text_graph(model, get_provider("cpu"), None) == first
    assert first.stat().st_mtime_ns == made
    weights = model.with_name("model.onnx.data")
    weights.write_bytes(weights.read_bytes()[:-4] + b"\x00\x00\x80\x3f")
    assert text_graph(model, get_provider("cpu"), None) != first


@pytest.mark.parametrize("case", ["bert", "deberta-v2", "embedding-gemma2-text"])
def test_joined_and_padded_texts_agree(tmp_path: Path, case: str) -> None:
    model = exported(tmp_path, case)
    joined, padded = open_texts(model, ("cpu",), None), PaddedTexts(model, ("cpu",), "to compare")
    assert isinstance(joined, JoinedTexts)
    assert joined.padded is None
    assert joined.ranks == padded.ranks
    assert joined.inputs == padded.inputs
    for found, expected in zip(
        joined.run(["last_hidden_state"], TEXTS), padded.run(["last_hidden_state"], TEXTS), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_what_quantize_writes_with_dynamic_int8_runs_without_padding(tmp_path: Path) -> None:
    model, small = exported(tmp_path, "bert"), tmp_path / "small.onnx"
    carryall.quantize(model, small, carryall.QuantizationRecipe("int8-dynamic"))
    joined = open_texts(small, ("cpu",), None)
    assert isinstance(joined, JoinedTexts), joined.padded
    (found,) = joined.run(["last_hidden_state"], TEXTS)
    (expected,) = PaddedTexts(model, ("cpu",), "to compare").run(["last_hidden_state"], TEXTS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.03 * np.abs(expected).max())


def test_larger_weights_are_near_the_padded_graph_and_the_same_bits_alone(tmp_path: Path) -> None:
    """They are products of bfloat16 where the processor has AMX, and those of float32 elsewhere."""
    source = write_case(tmp_path / "source", "bert")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps({**config, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2})
    )
    rng, sizes = np.random.default_rng(0), {16: 64, 24: 96}
    given = load_file(source / "model.safetensors")
    shapes = {name: [sizes.get(size, size) for size in array.shape] for name, array in given.items()}
    save_file(
        {name: (rng.standard_normal(shape) / 8).astype(np.float32) for name, shape in shapes.items()},
        source / "model.safetensors",
    )
    carryall.export(source, tmp_path / "out")
    model = tmp_path / "out" / "model.onnx"
    joined, padded = open_texts(model, ("cpu",), None), PaddedTexts(model, ("cpu",), "to compare")
    assert isinstance(joined, JoinedTexts)
    (found,) = joined.run(["last_hidden_state"], TEXTS)
    (expected,) = padded.run(["last_hidden_state"], TEXTS)
    near = 2e-5 if get_provider("cpu").kernel_form() else 2e-6
    np.testing.assert_allclose(found, expected, rtol=0, atol=near * np.abs(expected).max())
    for text, rows in zip(TEXTS, (slice(0, 5), slice(5, 6), slice(6, 9)), strict=True):
        np.testing.assert_array_equal(joined.run(["last_hidden_state"], [text])[0], found[rows])


def test_the_instruction_set_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exported(tmp_path, "bert")
    library = kernel_library()
    found = set()
    for isa in library.supported:
        if isa != PORTABLE:
            monkeypatch.setenv(ISA_VARIABLE, isa)
            found.add(text_graph(model, get_provider("cpu"), None))
    assert len(found) == 1 + (library.supported[0] == "amx")


def test_a_graph_that_keeps_its_form_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = exported(tmp_path, "deberta-v2-apart")
    with caplog.at_level(logging.INFO, "carryall"):
        session = open_texts(model, ("cpu",), None)
    assert isinstance(session, PaddedTexts)
    assert "may mix the tokens of several texts" in str(session.padded)
    assert str(session.padded) in caplog.text
    assert text_graph(model, get_provider("cpu"), None) == Unlowered(str(session.padded), foreign=False)


def test_runs_hold_texts_in_order_up_to_their_tokens(tmp_path: Path) -> None:
    session = open_texts(exported(tmp_path, "bert"), ("cpu",), None)
    assert isinstance(session, JoinedTexts)
    lengths = [5, 40, 1, 2000, 7]
    batches = session.batches(lengths)
    assert [place for batch in batches for place in batch] == list(range(5))
    assert [3] in batches
