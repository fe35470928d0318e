"""Encoders over the Open Inference Protocol and over carryall's gRPC service: those in this process."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_serving import Served, code_of, serving
from http_serving import HttpServed, http_serving
from null_llm import null_llm
from seeing_golden import pictures
from sentence_models import TEXTS, write_classifier, write_sentence_model
from tiny_encoders import CLASSIFIER, write_tiny_encoder
from tiny_picture_encoders import write_picture_encoder

import carryall
from carryall.client import AsyncClient
from carryall.errors import PromptTooLongError, RequestError, UnsupportedTaskError
from carryall.proto import kserve_pb2, kserve_pb2_grpc
from carryall.runtime.api.load_encoder import load_encoder
from carryall.runtime.service.core.model_entry import ModelLoader
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.kserve.tensors import from_raw, to_raw

Image = pytest.importorskip("PIL.Image")

FIELDS = {str: "string_param", int: "int64_param", bool: "bool_param"}
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    names = ("cls", "mean-later-key", "splade", "colbert")
    sources = {name: write_sentence_model(folder / f"{name}-source", name) for name in names}
    sources |= {name: write_classifier(folder / f"{name}-source", name) for name in ("names", "inference")}
    labels: dict[str, Any] = {"id2label": {"0": "LABEL_0"}}
    sources["ranker"] = write_tiny_encoder(folder / "ranker-source", "bert", CLASSIFIER, **labels)
    for name, source in sources.items():
        carryall.export(source, folder / name)
    return {name: folder / name for name in sources}


def repository(packages: dict[str, Path]) -> ModelRepository:
    def loader(folder: Path) -> ModelLoader:
        return ModelLoader(lambda: load_encoder(folder, "cpu", {}, warm_up=True), kind="encoder")

    return ModelRepository({name: loader(folder) for name, folder in packages.items()})


@asynccontextmanager
async def both(packages: dict[str, Path]) -> AsyncIterator[tuple[HttpServed, Served]]:
    models = repository(packages)
    await models.load_all()
    async with (
        null_llm() as unused,
        http_serving(None, models) as http,
        serving(unused, models) as served,
    ):
        yield http, served


def texts_tensor(name: str, texts: list[str]) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(texts)], "data": texts}


async def by_http(http: HttpServed, model: str, tensors: dict[str, list[str]], **more: Any) -> dict[str, Any]:
    """The outputs of a request as arrays, or its error."""
    inputs = [texts_tensor(name, texts) for name, texts in tensors.items()]
    answer = (await http.post(f"/v2/models/{model}/infer", inputs=inputs, **more)).json()
    if "error" in answer:
        return {"error": answer["error"]}
    return {
        each["name"]: each["data"]
        if each["datatype"] == "BYTES"
        else np.array(each["data"]).reshape(each["shape"])
        for each in answer["outputs"]
    }


async def by_grpc(
    served: Served, model: str, inputs: list[str] | dict[str, list[bytes]], **parameters: Any
) -> dict[str, Any]:
    tensors = inputs if isinstance(inputs, dict) else {"text_input": [text.encode() for text in inputs]}
    async with grpc.aio.insecure_channel(served.address) as channel:
        stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        request = kserve_pb2.ModelInferRequest(model_name=model)
        for name, elements in tensors.items():
            request.inputs.add(name=name, datatype="BYTES", shape=[len(elements)])
            request.raw_input_contents.append(to_raw(np.array(elements, object)))
        for name, value in parameters.items():
            setattr(request.parameters[name], FIELDS[type(value)], value)
        answer = await stub.ModelInfer(request)
        pairs = zip(answer.outputs, answer.raw_output_contents, strict=True)
        return {each.name: from_raw(each.name, each.datatype, each.shape, raw) for each, raw in pairs}


@pytest.mark.long
def test_vectors_and_scores_of_texts(packages: dict[str, Path]) -> None:
    cls, ranker = carryall.TextEncoder(packages["cls"]), carryall.TextClassifier(packages["ranker"])

    async def scenario() -> None:
        async with both(packages) as (http, served):
            found = await by_http(http, "cls", {"text_input": TEXTS})
            np.testing.assert_allclose(found["embedding"], cls.embed(TEXTS), **CLOSE)
            options = {"prompt_name": "query", "dimensions": 3, "truncate": True}
            long = [*TEXTS, "x" * 99]
            for outputs in (
                await by_http(http, "cls", {"text_input": long}, parameters=options),
                await by_grpc(served, "cls", long, **options),
            ):
                expected = cls.embed(long, prompt="query", dimensions=3, truncate=True)
                np.testing.assert_allclose(outputs["embedding"], expected, **CLOSE)
            found = await by_http(http, "ranker", {"query": ["q"], "text_input": TEXTS})
            np.testing.assert_allclose(found["scores"], ranker.rerank("q", TEXTS), **CLOSE)
            pairs = {"text_input": ["q"] * 3, "text_pair": TEXTS}
            found = await by_http(http, "ranker", pairs, parameters={"raw_scores": True})
            logits = ranker.logits([("q", text) for text in TEXTS])[:, 0]
            np.testing.assert_allclose(found["scores"], logits, **CLOSE)
            found = await by_http(http, "cls", {"query": ["b"], "text_input": TEXTS})
            np.testing.assert_allclose(found["scores"], cls.rerank("b", TEXTS), **CLOSE)
            stats = (await http.client.get("/v2/models/cls/stats")).json()["model_stats"][0]
            assert stats["inference_count"] == 3 + 4 + 3  # those over HTTP

    asyncio.run(scenario())


def test_vectors_of_pictures(tmp_path: Path) -> None:
    """As files over gRPC, and as addresses in JSON; behind the texts of the same request."""
    carryall.export(write_picture_encoder(tmp_path / "source", "clip"), tmp_path / "clip")
    encoder = carryall.TextEncoder(tmp_path / "clip")
    files = []
    for picture in pictures()[:2]:
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "PNG")
        files.append(buffer.getvalue())
    asked = [{"image": file} for file in files]
    plain = {"parameters": {"normalize": False}}
    addresses = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]

    async def scenario() -> None:
        async with both({"clip": tmp_path / "clip"}) as (http, served):
            found = await by_http(http, "clip", {"image": addresses}, **plain)
            np.testing.assert_allclose(found["embedding"], encoder.embed(asked), **CLOSE)
            found = await by_http(http, "clip", {"text_input": ["a cat"], "image": addresses[:1]}, **plain)
            np.testing.assert_allclose(found["embedding"], encoder.embed(["a cat", asked[0]]), **CLOSE)
            found = await by_grpc(served, "clip", {"image": files}, dimensions=4, normalize=False)
            np.testing.assert_allclose(found["embedding"], encoder.embed(asked, dimensions=4), **CLOSE)
            async with AsyncClient(served.address, attempts=1) as client:
                vectors = await client.embed(["a cat", *asked], model="clip", normalize=False)
                np.testing.assert_allclose(vectors, encoder.embed(["a cat", *asked]), **CLOSE)
                with pytest.raises(RequestError, match="text 1"):
                    await client.embed(["a cat", {"image": b"no picture"}], model="clip")
                with pytest.raises(RequestError, match="inputs is empty"):
                    await client.embed([], model="clip")
                with pytest.raises(RequestError, match="a picture to embed must be"):
                    await client.embed([{"image": b"", "text": b""}], model="clip")
            refused: list[tuple[dict[str, list[str]], str]] = [
                ({"image": ["no picture"]}, "text 0"),
                ({"image": ["/etc/passwd"]}, "text 0"),
                ({"image": []}, "the input 'image' is missing or has no element"),
                ({"query": ["a"], "text_input": ["b"], "image": addresses}, "'query' ranks texts"),
            ]
            for tensors, message in refused:
                assert message in (await by_http(http, "clip", tensors))["error"]

    asyncio.run(scenario())


def test_a_model_of_texts_takes_no_pictures(packages: dict[str, Path]) -> None:
    async def scenario() -> None:
        async with both({"cls": packages["cls"]}) as (http, _):
            found = await by_http(http, "cls", {"text_input": TEXTS, "image": ["x"]})
            assert "unknown input 'image'; the inputs are: text_input, query" in found["error"]

    asyncio.run(scenario())


def test_other_kinds_of_vectors_and_classes(packages: dict[str, Path]) -> None:
    async def scenario() -> None:
        async with both(packages) as (http, served):
            sparse = await by_grpc(served, "splade", TEXTS)
            ends = np.cumsum(sparse["sparse_lengths"])[:-1]
            indices, values = (np.split(sparse[f"sparse_{name}"], ends) for name in ("indices", "values"))
            expected = carryall.TextEncoder(packages["splade"]).embed_sparse(TEXTS)
            for row, weights, vector in zip(indices, values, expected, strict=True):
                assert row.tolist() == vector.indices.tolist()
                np.testing.assert_allclose(weights, vector.values, **CLOSE)
            multi = await by_http(http, "colbert", {"text_input": TEXTS})
            rows = np.split(multi["token_embedding"], np.cumsum(multi["token_lengths"])[:-1])
            tokens = carryall.TextEncoder(packages["colbert"]).embed_tokens(TEXTS)
            for row, vectors in zip(rows, tokens, strict=True):
                np.testing.assert_allclose(row, vectors, **CLOSE)
            classes = await by_http(http, "inference", {"text_input": TEXTS})
            classifier = carryall.TextClassifier(packages["inference"])
            assert classes["labels"] == classifier.labels
            np.testing.assert_allclose(classes["scores"], classifier.scores(TEXTS), **CLOSE)
            names = await by_http(http, "names", {"text_input": TEXTS})
            finder = carryall.TokenClassifier(packages["names"])
            for found, parts in zip(map(json.loads, names["entities"]), finder.entities(TEXTS), strict=True):
                assert [(part["label"], part["text"]) for part in found] == [
                    (part.label, part.text) for part in parts
                ]

    asyncio.run(scenario())


def test_a_model_tells_its_tensors(packages: dict[str, Path]) -> None:
    async def scenario() -> None:
        async with both(packages) as (http, _):
            facts = {
                name: (await http.client.get(f"/v2/models/{name}")).json()
                for name in ("cls", "splade", "names", "inference")
            }
            assert facts["cls"]["platform"] == "carryall_encoder"
            outputs = {name: [each["name"] for each in fact["outputs"]] for name, fact in facts.items()}
            assert outputs == {
                "cls": ["embedding", "scores"],
                "splade": ["sparse_indices", "sparse_values", "sparse_lengths", "scores"],
                "names": ["entities"],
                "inference": ["scores", "labels"],
            }
            config = (await http.client.get("/v2/models/cls/config")).json()
            assert [each["name"] for each in config["input"] if each["optional"]] == ["query"]

    asyncio.run(scenario())


BAD: list[tuple[str, dict[str, list[str]], dict[str, Any], str]] = [
    ("cls", {"text": ["x"]}, {}, "unknown input 'text'; the inputs are: text_input, query"),
    ("cls", {}, {}, "the input 'text_input' is missing"),
    ("cls", {"text_input": []}, {}, "'text_input' is missing or has no element"),
    ("cls", {"text_input": ["x"], "query": ["a", "b"]}, {}, "'query' must have one element, not 2"),
    ("cls", {"text_input": ["x" * 99]}, {}, "text 0 has 100 tokens; the model takes 38"),
    ("cls", {"text_input": ["x"]}, {"parameters": {"max_tokens": 3}}, "unknown parameter 'max_tokens'"),
    ("cls", {"text_input": ["x"]}, {"parameters": {"truncate": "yes"}}, "'truncate' must be a bool"),
    ("cls", {"text_input": ["x"]}, {"parameters": {"dimensions": 99}}, "'dimensions' is 99"),
    ("cls", {"text_input": ["x"]}, {"outputs": [{"name": "scores"}]}, "'scores' needs the input 'query'"),
    (
        "cls",
        {"text_input": ["x"]},
        {"outputs": [{"name": "sparse_values"}]},
        "unknown output 'sparse_values'",
    ),
    ("ranker", {"text_input": ["x"], "text_pair": []}, {}, "has 1 elements, but 'text_pair' has 0"),
    ("names", {"text_input": ["x"]}, {"parameters": {"aggregation": "sum"}}, "must be one of none, simple"),
    ("inference", {"text_input": ["x"], "query": ["q"]}, {}, "unknown input 'query'"),
]


def test_bad_requests_are_refused(packages: dict[str, Path]) -> None:
    async def scenario() -> None:
        async with both(packages) as (http, served):
            for model, tensors, more, message in BAD:
                found = await by_http(http, model, tensors, **more)
                assert message in found.get("error", ""), (tensors, more, found)
            numbers = [{"name": "text_input", "datatype": "INT64", "shape": [1], "data": [5]}]
            answer = await http.post("/v2/models/cls/infer", inputs=numbers)
            assert "must be BYTES, not INT64" in answer.text
            with pytest.raises(grpc.aio.AioRpcError, match="text 0 has 100 tokens"):
                await by_grpc(served, "cls", ["x" * 99])

    asyncio.run(scenario())


def test_carryalls_own_grpc(packages: dict[str, Path]) -> None:
    cls, pieces = carryall.TextEncoder(packages["cls"]), carryall.TextEncoder(packages["mean-later-key"])
    long = [*TEXTS, "x" * 99]

    async def scenario() -> None:
        async with both(packages) as (_, served), AsyncClient(served.address, attempts=1) as client:
            options: Any = {"prompt_name": "query", "truncate": True}
            vectors = await client.embed(long, model="cls", dimensions=3, **options)
            expected = cls.embed(long, prompt="query", truncate=True, dimensions=3)
            np.testing.assert_allclose(vectors, expected, **CLOSE)
            late = await client.embed(TEXTS[1:], model="mean-later-key", late_chunking=True, normalize=False)
            np.testing.assert_allclose(late, pieces.embed(TEXTS[1:], late_chunking=True), **CLOSE)
            sparse = await client.embed_sparse(TEXTS, model="splade")
            weights = carryall.TextEncoder(packages["splade"]).embed_sparse(TEXTS)
            for found, vector in zip(sparse, weights, strict=True):
                assert list(found.indices) == vector.indices.tolist()
                np.testing.assert_allclose(list(found.values), vector.values, **CLOSE)
            tokens = await client.embed_tokens(TEXTS[1:], model="colbert", prompt_name="query")
            rows = carryall.TextEncoder(packages["colbert"]).embed_tokens(TEXTS[1:], prompt="query")
            for found_rows, row in zip(tokens, rows, strict=True):
                np.testing.assert_allclose(found_rows, row, **CLOSE)
            assert await client.tokenize("aé", model="cls") == cls.encode(["aé"])[0].ids
            assert await client.detokenize(cls.encode(["aé"])[0].ids, model="cls") == "aé"
            raw = await client.rerank("q", TEXTS, model="ranker", raw_scores=True)
            logits = carryall.TextClassifier(packages["ranker"]).logits([("q", text) for text in TEXTS])
            assert {each.index: each.score for each in raw} == {
                place: pytest.approx(float(logits[place, 0]), abs=1e-5) for place in range(3)
            }

    asyncio.run(scenario())


def test_carryalls_own_grpc_classifies(packages: dict[str, Path]) -> None:
    classifier, finder = (
        carryall.TextClassifier(packages["inference"]),
        carryall.TokenClassifier(packages["names"]),
    )

    async def scenario() -> None:
        async with both(packages) as (_, served), AsyncClient(served.address, attempts=1) as client:
            pairs: list[Any] = [TEXTS[0], (TEXTS[0], TEXTS[1])]
            for raw, run in ((False, classifier.scores), (True, classifier.logits)):
                results = await client.classify(pairs, model="inference", raw_scores=raw)
                for result, row in zip(results, run(pairs), strict=True):
                    scores = {each.label: each.score for each in result.labels}
                    np.testing.assert_allclose([scores[label] for label in classifier.labels], row, **CLOSE)
                    assert list(scores.values()) == sorted(scores.values(), reverse=True)
            labels = ["sport", "art"]
            (chosen,) = await client.classify(
                TEXTS[:1], model="inference", candidate_labels=labels, hypothesis="is {}", multi_label=True
            )
            expected = classifier.zero_shot(TEXTS[:1], labels, hypothesis="is {}", independent=True)[0]
            found = {each.label: each.score for each in chosen.labels}
            np.testing.assert_allclose([found[label] for label in labels], expected, **CLOSE)
            named = await client.classify(TEXTS, model="names", aggregation="first")
            for result, parts in zip(named, finder.entities(TEXTS, aggregation="first"), strict=True):
                assert [(part.label, part.start, part.end, part.text) for part in result.parts] == [
                    (part.label, part.start, part.end, part.text) for part in parts
                ]

    asyncio.run(scenario())


def test_carryalls_own_grpc_refuses(packages: dict[str, Path]) -> None:
    async def scenario() -> None:
        async with both(packages) as (_, served), AsyncClient(served.address, attempts=1) as client:
            with pytest.raises(UnsupportedTaskError, match="has no sparse vectors; it has dense"):
                await client.embed_sparse(["x"], model="cls")
            with pytest.raises((RequestError, PromptTooLongError), match="document 1 has 100 tokens"):
                await client.rerank("q", ["x", "y" * 99], model="cls")
            with pytest.raises(RequestError, match="classifies texts, not pairs"):
                await client.classify([("a", "b")], model="names")
            with pytest.raises(RequestError, match="pools by cls"):
                await client.embed(TEXTS, model="cls", late_chunking=True)
            with pytest.raises(RequestError, match="must be one of none, simple"):
                await client.classify(["a"], model="names", aggregation="sum")
            with pytest.raises(UnsupportedTaskError, match="'cls' does not classify texts"):
                await client.classify(["a"], model="cls")
            request = kserve_pb2.ModelInferRequest(model_name="cls")
            async with grpc.aio.insecure_channel(served.address) as channel:
                stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
                assert (await code_of(stub.ModelInfer(request)))[0] == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())
