"""Folders of sentence-transformers, exported, against the vectors of that library."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sentence_models import MODELS, PROMPTS, TEXTS, write_classifier, write_sentence_model

import carryall
from carryall.errors import (
    CheckpointError,
    PackageError,
    PromptTooLongError,
    ProviderRuntimeError,
    RequestError,
    UnsupportedModelError,
)
from carryall.runtime.api.load_encoder import load_encoder
from carryall.runtime.api.text_encoder import _through
from carryall.runtime.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).with_name("golden") / "vectors.npz"
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def exported(tmp_path: Path, name: str) -> carryall.TextEncoder:
    carryall.export(write_sentence_model(tmp_path / "source", name), tmp_path / "out")
    return carryall.TextEncoder(tmp_path / "out", truncate=True)


def golden(name: str) -> dict[str, Any]:
    with np.load(GOLDEN) as arrays:
        return {key.partition("/")[2]: arrays[key] for key in arrays if key.partition("/")[0] == name}


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.kind == "dense"])
def test_dense_vectors(tmp_path: Path, name: str) -> None:
    encoder, expected = exported(tmp_path, name), golden(name)
    assert encoder.kinds == {"dense"}
    assert encoder.prompts == PROMPTS
    for prompt in (None, *PROMPTS):
        vectors = encoder.embed(TEXTS, prompt=prompt)
        np.testing.assert_allclose(vectors, expected[prompt or ""], **CLOSE)
    queries = encoder.embed(TEXTS, prompt="query")
    np.testing.assert_allclose(encoder.similarity(queries, queries), expected["similarity"], **CLOSE)
    cut = expected["cut"]
    # The library leaves the cut ones shorter.
    if any(kind == "Normalize" for kind, _ in MODELS[name].modules):
        cut = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    np.testing.assert_allclose(encoder.embed(TEXTS, prompt="query", dimensions=4), cut, **CLOSE)


@pytest.mark.parametrize("name", ["splade", "colbert", "colbert-mean"])
def test_sparse_vectors_and_vectors_of_tokens_rank(tmp_path: Path, name: str) -> None:
    """The golden scores are those of ``similarity`` of SparseEncoder and MultiVectorEncoder."""
    encoder, expected = exported(tmp_path, name), golden(name)["similarity"]
    prompts = {"query": encoder.prompt_text("query"), "document": encoder.prompt_text("document")}
    for query, row in zip(TEXTS, expected, strict=True):
        np.testing.assert_allclose(encoder.rerank(query, TEXTS), row, **CLOSE)
    pairs = [(query, text) for text in TEXTS for query in TEXTS]
    scores, counts = encoder.relevance(pairs)
    np.testing.assert_allclose(scores, expected.T.ravel(), **CLOSE)
    asked = encoder.token_counts([prompts["query"] + text for text in TEXTS])
    answers = encoder.token_counts([prompts["document"] + text for text in TEXTS])
    assert sum(counts) == sum(asked) + 3 * sum(answers)


PIECES = ["a long", "er text,", " than"]


@pytest.mark.parametrize("prompt", [None, "query"])
@pytest.mark.parametrize("name", ["mean-later-key", "dense-twice", "without-prompt"])
def test_pieces_of_a_document_are_means_of_its_states(tmp_path: Path, name: str, prompt: str | None) -> None:
    encoder = exported(tmp_path, name)
    words = encoder.prompt_text(prompt)
    (tokens,) = encoder.encode([words + "".join(PIECES)])
    # A tokenizer of bytes: each token has its characters, and pieces meet as in the whole text.
    (states,) = encoder.embed_tokens([tokens])
    ends = np.cumsum([len(words), *map(len, PIECES)])
    inside = [place for place, special in enumerate(tokens.special) if not special]
    rows = []
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        mine = [place for place in inside if start <= tokens.spans[place][0] < end]
        first = number == 0 and name != "without-prompt"
        before = list(range(mine[0])) if number == 0 and (first or not words) else []
        behind = list(range(inside[-1] + 1, len(states))) if number == 2 else []
        rows.append(states[[*before, *mine, *behind]].mean(0))
    layers = encoder._dense
    expected = _through(layers, np.stack(rows))
    if any(kind == "Normalize" for kind, _ in MODELS[name].modules):
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    found = encoder.embed(PIECES, prompt=prompt, late_chunking=True)
    np.testing.assert_allclose(found, expected, **CLOSE)
    (whole,) = encoder.embed(["".join(PIECES)], prompt=prompt, late_chunking=True)
    np.testing.assert_allclose(whole, encoder.embed(["".join(PIECES)], prompt=prompt)[0], **CLOSE)
    cut = encoder.embed(PIECES, prompt=prompt, late_chunking=True, dimensions=3)
    assert cut.shape == (3, 3)


def test_pieces_that_cannot_be_embedded_are_refused(tmp_path: Path) -> None:
    encoder = exported(tmp_path, "dense-twice")
    with pytest.raises(PromptTooLongError, match="the document has 101 tokens; the model takes 38"):
        encoder.embed(["x" * 50, "y" * 50], late_chunking=True)
    with pytest.raises(RequestError, match="piece 1 has no token; leave it out"):
        encoder.embed(["x", ""], late_chunking=True)
    with pytest.raises(RequestError, match="at least one piece"):
        encoder.embed([], late_chunking=True)
    with pytest.raises(RequestError, match="at least one piece, each a text"):
        encoder.embed([[5]], late_chunking=True)
    (tmp_path / "cls").mkdir()
    with pytest.raises(RequestError, match="pools by the mean; this one pools by cls"):
        exported(tmp_path / "cls", "cls").embed(["x"], late_chunking=True)


def test_errors_of_ranks_name_the_query_and_the_documents(tmp_path: Path) -> None:
    encoder = exported(tmp_path, "cls")
    with pytest.raises(PromptTooLongError, match="the query has 100 tokens; the model takes 38"):
        encoder.rerank("x" * 99, ["y"], truncate=False)
    with pytest.raises(PromptTooLongError, match="document 1 has 100 tokens"):
        encoder.rerank("x", ["y", "x" * 99], truncate=False)
    with pytest.raises(PromptTooLongError, match="query 1 has 100 tokens"):
        encoder.relevance([("x", "y"), ("x" * 99, "y")], truncate=False)
    with pytest.raises(RequestError, match="document 0 is not valid Unicode"):
        encoder.rerank("x", ["\udcff"])
    assert len(encoder.rerank("x" * 99, ["y"])) == 1


def test_sparse_vectors(tmp_path: Path) -> None:
    encoder, expected = exported(tmp_path, "splade"), golden("splade")
    assert encoder.kinds == {"sparse"}
    for prompt in (None, *PROMPTS):
        for vector, row in zip(
            encoder.embed_sparse(TEXTS, prompt=prompt), expected[prompt or ""], strict=True
        ):
            dense = np.zeros(len(row), np.float32)
            dense[vector.indices] = vector.values
            np.testing.assert_allclose(dense, row, **CLOSE)
            assert (vector.values > 0).all()
            assert (np.diff(vector.indices) > 0).all()
    with pytest.raises(RequestError, match="has no dense vectors; it has sparse"):
        encoder.embed(TEXTS)


def test_vectors_of_tokens(tmp_path: Path) -> None:
    encoder, expected = exported(tmp_path, "colbert"), golden("colbert")
    assert encoder.kinds == {"multi"}
    for prompt in (None, *PROMPTS):
        rows = encoder.embed_tokens(TEXTS, prompt=prompt)
        np.testing.assert_allclose(np.concatenate(rows), expected[prompt or ""], **CLOSE)
    with pytest.raises(RequestError, match="has no sparse vectors; it has multi"):
        encoder.embed_sparse(TEXTS)


def test_one_pass_gives_three_kinds_of_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads of BGE-M3, held against NumPy on the states of the same model."""
    from safetensors.numpy import save_file

    source, rng = write_sentence_model(tmp_path / "source", "cls"), np.random.default_rng(1)
    heads = {"sparse_linear": 1, "colbert_linear": 7}
    weights = {
        name: {
            "weight": rng.standard_normal((size, 16)).astype(np.float32),
            "bias": rng.standard_normal(size).astype(np.float32),
        }
        for name, size in heads.items()
    }
    for name in weights:
        (source / f"{name}.pt").write_bytes(b"a pickle")
    with pytest.raises(UnsupportedModelError, match=r"sparse_linear.pt is a pickle, .* weights_only=True"):
        carryall.export(source, tmp_path / "out")
    for name, tensors in weights.items():
        save_file(tensors, source / f"{name}.safetensors")
    carryall.export(source, tmp_path / "out")
    encoder = carryall.TextEncoder(tmp_path / "out")
    assert encoder.kinds == {"dense", "sparse", "multi"}
    np.testing.assert_allclose(encoder.embed(TEXTS), golden("cls")[""], **CLOSE)
    session = carryall.InferenceSession(tmp_path / "out/model.onnx", providers=["cpu"])
    for text, sparse, vectors in zip(
        TEXTS, encoder.embed_sparse(TEXTS), encoder.embed_tokens(TEXTS), strict=True
    ):
        ids = np.array([Tokenizer(tmp_path / "out").encode(text)])
        (states,) = session.run(
            ["last_hidden_state"], {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        )
        scores = states[0] @ weights["sparse_linear"]["weight"].T + weights["sparse_linear"]["bias"]
        best: dict[int, float] = {}
        for token, score in zip(ids[0].tolist(), scores[:, 0].tolist(), strict=True):
            if token < 256 and score > 0:
                best[token] = max(best.get(token, 0.0), score)
        assert sparse.indices.tolist() == sorted(best)
        np.testing.assert_allclose(sparse.values, [best[each] for each in sorted(best)], **CLOSE)
        expected = states[0, 1:] @ weights["colbert_linear"]["weight"].T + weights["colbert_linear"]["bias"]
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(vectors, expected, **CLOSE)
    runs: list[Any] = []
    run = encoder._batches.session.run

    def counted(*given: Any) -> Any:
        runs.append(given)
        return run(*given)

    monkeypatch.setattr(encoder._batches.session, "run", counted)
    kinds = encoder.embed_kinds(TEXTS[:1])
    assert len(runs) == 1
    np.testing.assert_array_equal(kinds["dense"], encoder.embed(TEXTS[:1]))
    np.testing.assert_array_equal(kinds["multi"][0], encoder.embed_tokens(TEXTS[:1])[0])
    np.testing.assert_array_equal(kinds["sparse"][0].values, encoder.embed_sparse(TEXTS[:1])[0].values)


def test_a_stated_length_is_checked_and_named_where_the_model_fails(tmp_path: Path) -> None:
    source = write_sentence_model(tmp_path / "source", "cls")
    (source / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 1000}))
    carryall.export(source, tmp_path / "out")
    with pytest.raises(ProviderRuntimeError, match=r"fails on texts of up to 62 tokens.* the 1000 tokens"):
        carryall.TextEncoder(tmp_path / "out").embed(["a", "x" * 61])
    for wrong in (-1, 0, "8", True, 1.5):
        (source / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": wrong}))
        with pytest.raises(PackageError, match="max_seq_length must be an integer of at least 1"):
            carryall.TextEncoder(source)


@pytest.mark.long
def test_ten_thousand_texts_are_embedded_at_once(tmp_path: Path) -> None:
    carryall.export(write_sentence_model(tmp_path / "source", "cls"), tmp_path / "out")
    encoder = carryall.TextEncoder(tmp_path / "out")
    vectors = encoder.embed([f"{number}" for number in range(10_000)])
    assert len(vectors) == 10_000
    places = [0, 77, 9_999]
    np.testing.assert_allclose(encoder.embed(list(map(str, places))), vectors[places], rtol=0, atol=1e-6)


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    encoder = exported(tmp_path, "cls")
    ids = Tokenizer(tmp_path / "out").encode(TEXTS[0])
    np.testing.assert_array_equal(encoder.embed([ids, TEXTS[1]]), encoder.embed(TEXTS[:2]))
    with pytest.raises(RequestError, match="token id 258 is out of range; the vocabulary has 258 tokens"):
        encoder.embed([[258]])
    with pytest.raises(RequestError, match="a prompt is put before texts, not before token ids"):
        encoder.embed([ids], prompt="query")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"prompt": "passage"}, "the encoder has no prompt 'passage'; it has query, document, long"),
        ({"dimensions": 17}, "'dimensions' is 17, but the model's vectors have 16"),
        ({"dimensions": 0}, "'dimensions' is 0, but the model's vectors have 16"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, call: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        exported(tmp_path, "cls").embed(TEXTS, **call)


def _write(name: str, content: Any) -> Any:
    return lambda folder: (folder / name).write_text(json.dumps(content))


def _pickle(folder: Path) -> None:
    (folder / "2_Dense/model.safetensors").rename(folder / "2_Dense/pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_pickle, UnsupportedModelError, r"pytorch_model.bin is a pickle, .*torch.load\('pytorch_model.bin'"),
        (
            _write("1_Pooling/config.json", {"pooling_mode": ["mean", "median"]}),
            UnsupportedModelError,
            "pooling by mean, median is not supported; supported: cls, max, mean,",
        ),
        (_write("1_Pooling/config.json", {"pooling_mode": 3}), CheckpointError, "'pooling_mode' .* found 3"),
        (_write("1_Pooling/config.json", {}), UnsupportedModelError, "pooling by nothing is not supported"),
        (
            _write("2_Dense/config.json", {"in_features": 16, "out_features": 9}),
            CheckpointError,
            r"'linear.bias'|expected shape \[9",
        ),
        (
            _write("2_Dense/config.json", {"in_features": 16, "out_features": -1}),
            CheckpointError,
            r"out_features and in_features are \[-1, 16\]",
        ),
        (
            _write("2_Dense/config.json", {"activation_function": "os.system"}),
            UnsupportedModelError,
            "the activation 'os.system' is not supported",
        ),
        (
            _write("config_sentence_transformers.json", {"prompts": {"a": 1}}),
            CheckpointError,
            "'prompts' must be texts by name",
        ),
        (
            _write("config_sentence_transformers.json", {"default_prompt_name": "a"}),
            CheckpointError,
            "'default_prompt_name' 'a' is none of none",
        ),
        (
            _write("config_sentence_transformers.json", {"similarity_fn_name": "hamming"}),
            UnsupportedModelError,
            "similarity 'hamming' is not supported; supported: cosine",
        ),
        (
            _write("modules.json", [{"type": "x.Pooling", "path": "../other"}]),
            PackageError,
            "which lies outside",
        ),
    ],
)
def test_broken_folders_are_refused_before_anything_is_written(
    tmp_path: Path, change: Any, error: type[Exception], message: str
) -> None:
    source = write_sentence_model(tmp_path / "source", "dense-twice")
    change(source)
    with pytest.raises(error, match=message):
        carryall.export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_vector_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    source = write_sentence_model(tmp_path / "source", "cls")
    tensors = load_file(source / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][65] = np.nan
    save_file(tensors, source / "model.safetensors")
    with pytest.warns(UserWarning, match="holds NaN or infinity"):
        carryall.export(source, tmp_path / "out")
    encoder = carryall.TextEncoder(tmp_path / "out")
    encoder.embed(["a"])
    with pytest.raises(ProviderRuntimeError, match="returned NaN or infinity for text 1"):
        encoder.embed(["a", "b", "a"])


def _damage(source: Path) -> Path:
    """Make the embedding of the letter "b" NaN."""
    path = source / "model.safetensors"
    tensors = load_file(path)
    (name,) = [name for name in tensors if name.endswith("word_embeddings.weight")]
    tensors[name][65] = np.nan
    save_file(tensors, path)
    return source


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("splade", lambda encoder: encoder.embed_sparse(["a", "b"])),
        ("splade", lambda encoder: encoder.rerank("a", ["a", "b"])),
        ("colbert", lambda encoder: encoder.embed_tokens(["a", "b"])),
        ("colbert", lambda encoder: encoder.rerank("a", ["a", "b"])),
        ("cls", lambda encoder: encoder.embed_tokens(["a", "b"])),
        ("mean-later-key", lambda encoder: encoder.embed_pieces([["a"], ["a", "b"]])),
        ("names", lambda encoder: encoder.entities(["a", "b"])),
        ("inference", lambda encoder: encoder.zero_shot(["a", "b"], ["x"])),
    ],
)
@pytest.mark.filterwarnings("ignore:.*holds NaN or infinity")
def test_nan_is_an_error_of_each_kind_of_answer(tmp_path: Path, name: str, call: Any) -> None:
    write = write_sentence_model if name in MODELS else write_classifier
    carryall.export(_damage(write(tmp_path / "source", name)), tmp_path / "out")
    with pytest.raises(ProviderRuntimeError, match="returned NaN"):
        call(load_encoder(tmp_path / "out", "cpu", {}, warm_up=False))
