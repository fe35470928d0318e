"""Embeddings by encoders in sentence-transformers' layout, held against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from encoder_kit import states, write_encoder

from carryall.errors import (
    CarryallError,
    ModelNotFoundError,
    PackageError,
    PromptTooLongError,
    RequestError,
    UnsupportedModelError,
    UsageError,
)
from carryall.runtime.api.text_encoder import TextEncoder

TEXTS = ["b", "aé", "", "a longer text " * 4]


ORACLE = {
    "cls": lambda rows: rows[0],
    "mean": lambda rows: rows.astype(np.float64).mean(0),
    "max": lambda rows: rows.max(0),
    "last": lambda rows: rows[-1],
}


@pytest.mark.parametrize("mode", ORACLE)
@pytest.mark.parametrize("normalize", [False, True])
def test_vectors_are_pooled_as_the_folder_says(tmp_path: Path, mode: str, normalize: bool) -> None:
    folder = write_encoder(tmp_path / "m", mode, normalize=normalize)
    found = TextEncoder(folder).embed(TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        expected = ORACLE[mode](states(folder, text))
        expected = expected / np.linalg.norm(expected) if normalize else expected
        np.testing.assert_allclose(vector, expected, rtol=0, atol=2e-6)


def test_arguments_override_the_folder(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m", "mean", normalize=True, max_seq_length=4)
    encoder = TextEncoder(folder, pooling="last", normalize=False, truncate=True)
    np.testing.assert_array_equal(encoder.embed(["abcdef"])[0], states(folder, "abcdef", 4)[-1])
    with pytest.raises(PromptTooLongError, match="text 1 has 7 tokens; the model takes 4"):
        encoder.embed(["ab", "abcdef"], truncate=False)
    longer = TextEncoder(folder, pooling="last", normalize=False, max_tokens=5)
    np.testing.assert_array_equal(longer.embed(["abcdef"], truncate=True)[0], states(folder, "abcdef", 5)[-1])
    with pytest.raises(PromptTooLongError, match="text 0 has 7 tokens; the model takes 5"):
        longer.embed(["abcdef"])


def test_many_texts_come_back_in_their_order(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m", "last")
    encoder = TextEncoder(folder)
    texts = [chr(97 + n % 26) * (n % 7 + 1) for n in range(80)]
    np.testing.assert_array_equal(encoder.embed(texts), [states(folder, text)[-1] for text in texts])
    assert encoder.embed([]).shape[0] == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda folder: (folder / "onnx/model.onnx").unlink(), ModelNotFoundError, "needs model.onnx or"),
        (lambda folder: (folder / "tokenizer.json").unlink(), ModelNotFoundError, "and tokenizer.json"),
        (lambda folder: (folder / "modules.json").unlink(), UsageError, "does not say how to pool"),
        (
            lambda folder: (folder / "modules.json").write_text('[{"type": "x.CNN", "path": "3"}]'),
            UnsupportedModelError,
            "modules CNN are not supported; supported: Dense, ",
        ),
        (lambda folder: (folder / "modules.json").write_text("{}x"), PackageError, "is no list of modules"),
        (lambda folder: (folder / "modules.json").write_text("[1]"), PackageError, "is no list of modules"),
        (
            lambda folder: (folder / "1_Pooling/config.json").write_text(
                '{"pooling_mode_median_tokens": true}'
            ),
            UnsupportedModelError,
            "pooling by median_tokens is not supported; supported: cls, max, mean, ",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(
    tmp_path: Path, change: Any, error: type[CarryallError], message: str
) -> None:
    folder = write_encoder(tmp_path / "m")
    change(folder)
    with pytest.raises(error, match=message):
        TextEncoder(folder)


def test_a_model_without_states_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m")
    value = ir.val("input_ids", ir.DataType.INT64, ["n", "t"])
    node = ir.node("Identity", [value])
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "logits", value.type, value.shape
    graph = ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": 21})
    ir.save(ir.Model(graph, ir_version=10), folder / "onnx/model.onnx")
    with pytest.raises(UnsupportedModelError, match=r"needs an output sentence_embedding .* not logits"):
        TextEncoder(folder)


def test_a_text_alone_is_no_list(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="a list of texts"):
        TextEncoder(write_encoder(tmp_path / "m")).embed("text")
