"""The endpoints of text-embeddings-inference are those of the encoders in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_serving import http_serving
from safetensors.numpy import load_file, save_file
from sentence_models import TEXTS, write_classifier, write_sentence_model
from tiny_encoders import CLASSIFIER, write_tiny_encoder

import carryall
from carryall.runtime.api.load_encoder import load_encoder
from carryall.runtime.service.core.model_entry import ModelLoader
from carryall.runtime.service.core.repository import ModelRepository

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    sources = {
        name: write_sentence_model(folder / f"{name}-source", name)
        for name in ("cls", "mean-later-key", "splade", "colbert")
    }
    sources |= {name: write_classifier(folder / f"{name}-source", name) for name in ("names", "inference")}
    labels: dict[str, Any] = {"id2label": {"0": "LABEL_0"}}
    sources["ranker"] = write_tiny_encoder(folder / "ranker-source", "bert", CLASSIFIER, **labels)
    for name, source in sources.items():
        carryall.export(source, folder / name)
    return {name: folder / name for name in sources}


@asynccontextmanager
async def served(packages: dict[str, Path]) -> AsyncIterator[Any]:
    def loader(folder: Path) -> ModelLoader:
        return ModelLoader(lambda: load_encoder(folder, "cpu", {}, warm_up=True), kind="encoder")

    models = ModelRepository({name: loader(folder) for name, folder in packages.items()})
    async with http_serving(None, models) as http:
        yield http


def answers(packages: dict[str, Path], *asked: tuple[str, dict[str, Any]]) -> list[Any]:
    """Return the JSON of each answer, whose status is 200."""

    async def scenario() -> list[Any]:
        results = []
        async with served(packages) as http:
            for path, body in asked:
                answer = await http.post(path, **body)
                assert answer.status_code == 200, answer.text
                results.append(answer.json())
        return results

    return asyncio.run(scenario())


def test_dense_vectors_and_similarities(packages: dict[str, Path]) -> None:
    encoder = carryall.TextEncoder(packages["cls"])
    sentences = {"source_sentence": TEXTS[1], "sentences": TEXTS}
    queries = {"prompt_name": "query", "model": "cls"}
    cut = {"inputs": "x" * 99, "truncate": True}
    vectors, one, short, openai, similar, long = answers(
        packages,
        ("/embed", {"inputs": TEXTS, **queries, "truncate": True}),
        ("/embed", {"inputs": TEXTS[0], "model": "cls"}),
        ("/embed", {"inputs": [[256, 65]], "model": "cls", "dimensions": 3}),
        ("/v1/embeddings", {"input": TEXTS[1], **queries, "dimensions": 5}),
        ("/similarity", {"inputs": sentences, "model": "cls", "parameters": {"truncate": True}}),
        ("/embed", {**cut, "model": "cls"}),
    )
    np.testing.assert_allclose(vectors, encoder.embed(TEXTS, prompt="query", truncate=True), **CLOSE)
    np.testing.assert_allclose(one, encoder.embed(TEXTS[:1]), **CLOSE)
    np.testing.assert_allclose(short, encoder.embed(["b"], dimensions=3), **CLOSE)
    expected = encoder.embed([TEXTS[1]], prompt="query", dimensions=5)[0]
    np.testing.assert_allclose(openai["data"][0]["embedding"], expected, **CLOSE)
    dense = encoder.embed(TEXTS)
    np.testing.assert_allclose(similar, encoder.similarity(dense[1:2], dense)[0], **CLOSE)
    np.testing.assert_allclose(long, encoder.embed(["x" * 37]), **CLOSE)


def test_late_chunking_has_the_form_of_jinas_api(packages: dict[str, Path]) -> None:
    pieces = [{"text": text} for text in TEXTS[1:]]
    late = {"late_chunking": True, "model": "mean-later-key", "normalize": False}
    plain, objects = answers(
        packages,
        ("/v1/embeddings", {"input": TEXTS[1:], **late}),
        ("/v1/embeddings", {"input": pieces, **late}),
    )
    expected = carryall.TextEncoder(packages["mean-later-key"]).embed(TEXTS[1:], late_chunking=True)
    np.testing.assert_allclose([each["embedding"] for each in plain["data"]], expected, **CLOSE)
    assert plain["data"] == objects["data"]
    assert plain["usage"]["prompt_tokens"] == sum(map(len, TEXTS[1:])) + 1


def test_sparse_vectors_and_vectors_of_tokens(packages: dict[str, Path]) -> None:
    sparse, tokens = answers(
        packages,
        ("/embed_sparse", {"inputs": TEXTS, "model": "splade"}),
        ("/embed_all", {"inputs": TEXTS[1], "model": "colbert"}),
    )
    for found, vector in zip(
        sparse, carryall.TextEncoder(packages["splade"]).embed_sparse(TEXTS), strict=True
    ):
        assert [each["index"] for each in found] == vector.indices.tolist()
        np.testing.assert_allclose([each["value"] for each in found], vector.values, **CLOSE)
    (expected,) = carryall.TextEncoder(packages["colbert"]).embed_tokens([TEXTS[1]])
    np.testing.assert_allclose(tokens[0], expected, **CLOSE)


def test_ranks_have_the_shape_that_is_asked_for(packages: dict[str, Path]) -> None:
    classifier = carryall.TextClassifier(packages["ranker"])
    pairs: list[Any] = [("q", text) for text in TEXTS]
    scores, logits = classifier.scores(pairs)[:, 0], classifier.logits(pairs)[:, 0]
    order = sorted(range(3), key=lambda place: -scores[place])
    tei, raw, cohere = answers(
        packages,
        ("/rerank", {"query": "q", "texts": TEXTS, "return_text": True, "model": "ranker"}),
        ("/rerank", {"query": "q", "texts": TEXTS, "raw_scores": True, "model": "ranker"}),
        ("/v2/rerank", {"query": "q", "documents": TEXTS, "top_n": 1, "model": "ranker"}),
    )
    assert [(each["index"], each["text"]) for each in tei] == [(place, TEXTS[place]) for place in order]
    np.testing.assert_allclose([each["score"] for each in tei], scores[order], **CLOSE)
    np.testing.assert_allclose([each["score"] for each in raw], logits[order], **CLOSE)
    assert [each["index"] for each in cohere["results"]] == order[:1]


def test_vectors_of_tokens_and_sparse_vectors_rank(packages: dict[str, Path]) -> None:
    colbert, splade, scored = answers(
        packages,
        ("/rerank", {"query": "b", "documents": TEXTS, "model": "colbert"}),
        ("/rerank", {"query": "b", "texts": TEXTS, "model": "splade"}),
        ("/score", {"text_1": "b", "text_2": TEXTS, "model": "colbert"}),
    )
    expected = carryall.TextEncoder(packages["colbert"]).rerank("b", TEXTS)
    found = {each["index"]: each["relevance_score"] for each in colbert["results"]}
    np.testing.assert_allclose([found[place] for place in range(3)], expected, **CLOSE)
    np.testing.assert_allclose([each["score"] for each in scored["data"]], expected, **CLOSE)
    sparse = {each["index"]: each["score"] for each in splade}
    expected = carryall.TextEncoder(packages["splade"]).rerank("b", TEXTS)
    np.testing.assert_allclose([sparse[place] for place in range(3)], expected, **CLOSE)


def test_tokens_of_texts(packages: dict[str, Path]) -> None:
    ids = carryall.TextEncoder(packages["cls"]).encode(["aé b"])[0].ids
    tokens, bare, prompted, decoded, several, vllm, text = answers(
        packages,
        ("/tokenize", {"inputs": ["aé b", "b"], "model": "cls"}),
        ("/tokenize", {"inputs": "aé b", "add_special_tokens": False, "model": "cls"}),
        ("/tokenize", {"inputs": "b", "prompt_name": "query", "model": "cls"}),
        ("/decode", {"ids": ids, "model": "cls"}),
        ("/decode", {"ids": [ids, ids[:2]], "skip_special_tokens": False, "model": "cls"}),
        ("/tokenize", {"prompt": "aé b", "return_token_strs": True, "model": "cls"}),
        ("/detokenize", {"tokens": ids, "model": "cls"}),
    )
    assert [token["id"] for token in tokens[0]] == ids
    (special,) = [token for token in tokens[0] if token["special"]]
    assert (special["start"], special["stop"], special["text"]) == (None, None, "<s>")
    plain = [token for token in tokens[0] if not token["special"]]
    assert all(token["text"] == "aé b"[token["start"] : token["stop"]] for token in plain)
    assert [plain[0]["text"], plain[-1]["text"]] == ["a", "b"]
    assert (bare, len(tokens)) == ([plain], 2)
    assert "".join(token["text"] for token in prompted[0] if not token["special"]) == "search: b"
    assert decoded == ["aé b"]
    assert several[0] == text["prompt"] == "<s>aé b"
    assert (vllm["token_strs"][0], vllm["token_strs"][-1]) == ("<s>", "b")
    assert (vllm["count"], vllm["max_model_len"], vllm["tokens"]) == (len(ids), 38, ids)


@pytest.mark.long
def test_info_tells_the_kind_of_the_only_model(packages: dict[str, Path]) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "cls": {"embedding": {"pooling": "cls"}},
        "splade": {"embedding": {"pooling": "splade"}},
        "ranker": {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}},
    }
    for name, kind in kinds.items():
        (vectors,) = answers({name: packages[name]}, ("/", ROOT[name]))
        assert vectors == answers(packages, (PATHS[name], {**ROOT[name], "model": name}))[0]
        found = asyncio.run(info(name, packages[name]))
        assert (found["model_id"], found["model_type"]) == (name, kind)
        assert found["max_client_batch_size"] == 2048
        assert not found["auto_truncate"]
    assert asyncio.run(info("cls", packages["cls"]))["max_input_length"] == 38


ROOT: dict[str, dict[str, Any]] = {
    "cls": {"inputs": TEXTS},
    "splade": {"query": "b", "texts": TEXTS},
    "ranker": {"inputs": TEXTS[0]},
}
PATHS = {"cls": "/embed", "splade": "/rerank", "ranker": "/predict"}


async def info(name: str, folder: Path) -> Any:
    async with served({name: folder}) as http:
        return (await http.client.get("/info")).json()


def test_classes_names_and_labels_of_a_request(packages: dict[str, Path]) -> None:
    labels = {"candidate_labels": ["sport", "art"], "hypothesis_template": "is {}"}
    one, pair, several, names, chosen, best, some = answers(
        packages,
        ("/predict", {"inputs": TEXTS[0], "model": "inference"}),
        ("/predict", {"inputs": [TEXTS[0], TEXTS[1]], "model": "inference", "raw_scores": True}),
        ("/predict", {"inputs": [[TEXTS[0]], [TEXTS[0], TEXTS[1]]], "model": "inference"}),
        ("/predict", {"inputs": TEXTS[0], "model": "names"}),
        ("/predict", {"inputs": TEXTS[0], "model": "inference", "parameters": labels}),
        (
            "/predict",
            {
                "inputs": TEXTS[0],
                "model": "inference",
                "parameters": {"top_k": 1, "function_to_apply": "sigmoid"},
            },
        ),
        (
            "/predict",
            {"inputs": TEXTS[0], "model": "names", "parameters": {"ignore_labels": ["O", "PER"]}},
        ),
    )
    classifier = carryall.TextClassifier(packages["inference"])
    given: list[Any] = [TEXTS[0], (TEXTS[0], TEXTS[1])]
    scores = classifier.scores(given)
    by_label = [{each["label"]: each["score"] for each in answer} for answer in several]
    for found, row in zip(by_label, scores, strict=True):
        np.testing.assert_allclose([found[label] for label in classifier.labels], row, **CLOSE)
    assert [each["score"] for each in one] == sorted((each["score"] for each in one), reverse=True)
    logits = dict(zip(classifier.labels, classifier.logits(given)[1].tolist(), strict=True))
    assert {each["label"]: pytest.approx(each["score"], abs=1e-5) for each in pair} == logits
    (parts,) = carryall.TokenClassifier(packages["names"]).entities([TEXTS[0]])
    assert [(each["entity_group"], each["start"], each["end"], each["word"]) for each in names] == [
        (part.label, part.start, part.end, part.text) for part in parts
    ]
    assert [each["start"] for each in some] == [part.start for part in parts if part.label != "PER"]
    best_logit = float(classifier.logits([TEXTS[0]]).max())
    ((top,),) = best
    assert top["score"] == pytest.approx(1 / (1 + np.exp(-best_logit)), abs=1e-5)
    expected = classifier.zero_shot([TEXTS[0]], ["sport", "art"], hypothesis="is {}")[0]
    assert {each["label"]: each["score"] for each in chosen} == {
        "sport": pytest.approx(float(expected[0]), abs=1e-5),
        "art": pytest.approx(float(expected[1]), abs=1e-5),
    }


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/embed", {"inputs": "x" * 99, "model": "cls"}, 400, "text 0 has 100 tokens; the model takes 38"),
    ("/embed", {"inputs": [], "model": "cls"}, 400, "'inputs' must be a string"),
    ("/embed", {"inputs": ["x"] * 10_000, "model": "cls"}, 400, "10000 texts; the maximum is 2048"),
    ("/v1/embeddings", {"input": ["x"] * 10_000, "model": "cls"}, 400, "10000 texts; the maximum is 2048"),
    ("/rerank", {"query": "q", "texts": ["x"] * 10_000, "model": "cls"}, 400, "10000 texts; the maximum is"),
    ("/v1/embeddings", {"input": [], "model": "cls"}, 400, "'input' must be a string"),
    ("/v1/embeddings", {"input": [[]], "model": "cls"}, 400, "text 0 to embed is empty"),
    ("/v1/embeddings", {"input": ["x", []], "model": "cls"}, 400, "text 1 to embed is empty"),
    ("/v1/embeddings", {"model": "cls"}, 400, "'input' must be a string"),
    ("/v1/embeddings", {"input": [[5, 9999]], "model": "cls"}, 400, "token id 9999 is out of range"),
    ("/embed", {"inputs": "x", "model": "cls", "dimensions": 99}, 400, "'dimensions' is 99"),
    ("/embed", {"inputs": "x", "model": "cls", "prompt_name": "passage"}, 400, "has no prompt 'passage'"),
    ("/embed", {"inputs": "x", "model": "cls", "truncate": "yes"}, 400, "'truncate'"),
    ("/embed", {"inputs": "x", "model": "cls", "truncation_direction": "Left"}, 400, "must be Right"),
    ("/embed", {"inputs": "x", "model": "splade"}, 501, "has no dense vectors; it has sparse"),
    ("/embed_sparse", {"inputs": "x", "model": "cls"}, 501, "has no sparse vectors; it has dense"),
    ("/embed_all", {"inputs": [1], "model": "cls"}, 400, "'inputs' must be a string or a list of strings"),
    ("/similarity", {"inputs": {"sentences": ["x"]}, "model": "cls"}, 400, "'source_sentence' is required"),
    ("/similarity", {"inputs": {"source_sentence": "x"}, "model": "cls"}, 400, "'sentences' must be"),
    ("/tokenize", {"inputs": 3, "model": "cls"}, 400, "'inputs' must be a string or a list of strings"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "model": "cls"}, 501, "no chat template"),
    ("/decode", {"ids": [[1], 2], "model": "cls"}, 400, "'ids' must be a list of token ids"),
    ("/decode", {"ids": [9999], "model": "cls"}, 400, "token id 9999 is out of range"),
    ("/rerank", {"query": "q", "documents": ["x", "y" * 99], "model": "cls"}, 400, "document 1 has 100"),
    ("/rerank", {"query": "q" * 99, "documents": ["x"], "model": "cls"}, 400, "the query has 100 tokens"),
    ("/rerank", {"query": "q", "documents": ["x"], "model": "names"}, 501, "it does not rank"),
    ("/v1/embeddings", {"input": ["x"], "late_chunking": True, "model": "cls"}, 400, "pools by cls"),
    ("/v1/embeddings", {"input": ["x"], "late_chunking": 1, "model": "cls"}, 400, "'late_chunking'"),
    ("/predict", {"inputs": "x", "model": "cls"}, 501, "'cls' does not classify texts"),
    ("/predict", {"inputs": [["a", "b", "c"]], "model": "inference"}, 400, "one or two texts"),
    (
        "/predict",
        {"inputs": "x", "model": "inference", "parameters": 3},
        400,
        "'parameters' must be an object",
    ),
    ("/rerank", {"query": "q", "texts": [], "model": "ranker"}, 400, "'texts' must be"),
    ("/embed", {"inputs": "x", "model": "cls", "encoding_format": "hex"}, 400, "must be float or base64"),
    *(
        ("/predict", {"inputs": "x", "model": model, "parameters": parameters}, 400, message)
        for model, parameters, message in (
            ("inference", {"top_k": 0}, "'top_k' must be an integer"),
            ("inference", {"function_to_apply": "relu"}, "must be sigmoid, softmax or none"),
            ("names", {"ignore_labels": ["PER"]}, "'ignore_labels' must have 'O'"),
            ("names", {"stride": 5}, "'stride' is not supported"),
        )
    ),
    ("/v1/embeddings", {"input": "x" * 99, "model": "cls"}, 400, "text 0 has 100 tokens"),
    ("/api/embed", {"input": "x" * 99, "model": "cls", "truncate": False}, 400, "text 0 has 100 tokens"),
]


def test_bad_requests_are_refused_and_the_service_lives_on(packages: dict[str, Path]) -> None:
    async def scenario() -> None:
        async with served(packages) as http:
            for path, body, status, message in BAD:
                answer = await http.post(path, **body)
                assert (answer.status_code, message in answer.text) == (status, True), (path, answer.text)
            surrogate = b'{"inputs": ["x", "\\ud800"], "model": "cls"}'
            answer = await http.client.post("/embed", content=surrogate)
            assert (answer.status_code, "text 1 is not valid Unicode" in answer.text) == (400, True)
            assert (await http.post("/embed", inputs="x", model="cls")).status_code == 200
            cut = await http.post("/api/embed", input="x" * 99, model="cls")  # Ollama cuts by default
            assert cut.status_code == 200

    asyncio.run(scenario())


def test_empty_texts_are_those_of_their_special_tokens(packages: dict[str, Path]) -> None:
    """As sentence-transformers and text-embeddings-inference do; a tokenizer without any is an error."""
    (vectors,) = answers(packages, ("/embed", {"inputs": ["", "b"], "model": "cls"}))
    expected = carryall.TextEncoder(packages["cls"]).embed([[256], "b"])
    np.testing.assert_allclose(vectors, expected, **CLOSE)


def _broken_pooling(folder: Path) -> None:
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "median"}')


def _other_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["z"] = 302
    (folder / "tokenizer.json").write_text(json.dumps(content))


def _not_numbers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: np.full_like(each, np.nan) for name, each in tensors.items()}
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "text", "message"),
    [
        (_broken_pooling, "x", "pooling by median is not supported"),
        (_other_tokenizer, "z", "text 0 has the token 302, but the model has embeddings of 258 tokens"),
        (_not_numbers, "x", "the model returned NaN or infinity for text 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*holds NaN or infinity")
def test_a_damaged_folder_is_named_and_the_service_lives_on(
    packages: dict[str, Path], tmp_path: Path, damage: Callable[[Path], None], text: str, message: str
) -> None:
    source = write_sentence_model(tmp_path / "bad", "cls")
    damage(source)

    async def scenario() -> None:
        async with served({"bad": source, "cls": packages["cls"]}) as http:
            for path, body in (("/embed", {"inputs": text}), ("/v1/embeddings", {"input": text})):
                answer = await http.post(path, **body, model="bad")
                assert answer.status_code >= 400
                assert message in answer.text
                assert (await http.post(path, **body, model="cls")).status_code == 200

    asyncio.run(scenario())


def test_ollamas_clients_are_told_which_encoders_make_vectors(packages: dict[str, Path]) -> None:
    shown = answers(packages, *(("/api/show", {"model": name}) for name in ("cls", "splade", "inference")))
    assert [answer["capabilities"] for answer in shown] == [["embedding"], [], []]
