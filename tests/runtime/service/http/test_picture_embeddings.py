"""Vectors and labels of pictures over HTTP, in the forms of Jina's, vLLM's and Hugging Face's APIs."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_serving import http_serving
from internet import Net, found, says
from picture_encoder_golden import HYPOTHESIS, LABELS
from seeing_golden import pictures
from sentence_models import write_sentence_model
from tiny_picture_encoders import write_picture_encoder

import carryall
from carryall.runtime.api.load_encoder import load_encoder
from carryall.runtime.service.core.model_entry import ModelLoader
from carryall.runtime.service.core.repository import ModelRepository

Image = pytest.importorskip("PIL.Image")

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def png(place: int) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pictures()[place]).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def address(place: int) -> str:
    return f"data:image/png;base64,{png(place)}"


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def message(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    sources = {name: write_picture_encoder(folder / f"{name}-source", name) for name in ("clip", "siglip")}
    sources["texts"] = write_sentence_model(folder / "texts-source", "cls")
    for name, source in sources.items():
        carryall.export(source, folder / name)
    return {name: folder / name for name in sources}


def answers(packages: dict[str, Path], *asked: tuple[str, dict[str, Any]]) -> list[tuple[int, Any]]:
    """Return the status and the JSON of each answer."""

    def loader(folder: Path) -> ModelLoader:
        return ModelLoader(lambda: load_encoder(folder, "cpu", {}, warm_up=True), kind="encoder")

    async def scenario() -> list[tuple[int, Any]]:
        models = ModelRepository({name: loader(folder) for name, folder in packages.items()})
        async with http_serving(None, models) as http:
            found = [await http.post(path, **body) for path, body in asked]
            return [(answer.status_code, answer.json()) for answer in found]

    return asyncio.run(scenario())


def test_all_forms_of_a_picture_have_its_vector(packages: dict[str, Path]) -> None:
    clip: dict[str, Any] = {"model": "clip", "normalize": False}
    mixed = [{"image": png(0)}, "a cat", {"text": "a cat"}, {"image": address(1)}, part(address(0))]
    found = answers(
        packages,
        ("/v1/embeddings", {**clip, "input": mixed}),
        ("/v1/embeddings", {**clip, "input": {"image": address(1)}}),
        ("/v1/embeddings", {**clip, "messages": message(part(address(1)))}),
        ("/v1/embeddings", {**clip, "messages": message({"type": "text", "text": "a cat"})}),
        ("/embed", {**clip, "inputs": [{"image": png(1)}, "a cat"]}),
    )
    assert [status for status, _ in found] == [200] * 5
    encoder = carryall.TextEncoder(packages["clip"])
    first, second, text = encoder.embed([*({"image": each} for each in pictures()), "a cat"])
    rows = [[row["embedding"] for row in answer["data"]] for _, answer in found[:4]]
    np.testing.assert_allclose(rows[0], [first, text, text, second, first], **CLOSE)
    np.testing.assert_allclose([rows[1][0], rows[2][0], rows[3][0]], [second, second, text], **CLOSE)
    np.testing.assert_allclose(found[4][1], [second, text], **CLOSE)
    assert found[0][1]["usage"]["prompt_tokens"] == 2 * len(encoder.encode(["a cat"])[0].ids)
    assert found[1][1]["usage"]["prompt_tokens"] == 0


def test_a_picture_of_an_allowed_host_is_fetched(packages: dict[str, Path]) -> None:
    net, url = Net(says(found(base64.b64decode(png(0))))), "http://plain.example/0.png"

    async def scenario() -> list[tuple[int, Any]]:
        load = ModelLoader(lambda: load_encoder(packages["clip"], "cpu", {}, warm_up=True), kind="encoder")
        models = ModelRepository({"clip": [load]})
        allowed = ("http://plain.example",)
        async with net.behind(models.fetcher), http_serving(None, models, image_domains=allowed) as http:
            inputs: list[Any] = [[part(url), "a cat", part(url)], part("http://other.example/")]
            answers = [await http.post("/v1/embeddings", input=each, normalize=False) for each in inputs]
            return [(answer.status_code, answer.json()) for answer in answers]

    (status, vectors), (refused, error) = asyncio.run(scenario())
    assert (status, refused, len(net.asked)) == (200, 400, 1)
    assert "fetches no pictures from http://other.example" in error["error"]["message"]
    expected = carryall.TextEncoder(packages["clip"]).embed([{"image": pictures()[0]}, "a cat"])
    rows = [row["embedding"] for row in vectors["data"]]
    np.testing.assert_allclose(rows, expected[[0, 1, 0]], **CLOSE)


@pytest.mark.parametrize("model", ["clip", "siglip"])
def test_labels_of_pictures(packages: dict[str, Path], model: str) -> None:
    parameters = {"candidate_labels": LABELS, "hypothesis_template": HYPOTHESIS}
    body = {"model": model, "parameters": parameters}
    several = [{"image": png(0)}, {"image": address(1)}]
    found = answers(
        packages,
        ("/predict", {**body, "inputs": several}),
        ("/predict", {**body, "inputs": png(0)}),
        ("/predict", {**body, "inputs": "a text"}),
    )
    encoder = carryall.TextEncoder(packages[model])
    expected = encoder.zero_shot([{"image": each} for each in pictures()], LABELS, hypothesis=HYPOTHESIS)
    assert [status for status, _ in found] == [200, 200, 400]
    for answer, scores in zip([*found[0][1], found[1][1]], expected[[0, 1, 0]], strict=True):
        named = {each["label"]: each["score"] for each in answer}
        np.testing.assert_allclose([named[label] for label in LABELS], scores, **CLOSE)
        assert [each["score"] for each in answer] == sorted(named.values(), reverse=True)
    assert "is not base64" in found[2][1]["error"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "body", "reason"),
    [
        ("texts", {"input": [{"image": png(0)}]}, "this model reads text only, not images"),
        ("clip", {"input": ["x", {"image": "https://example.com/x.png"}]}, "not fetched from addresses"),
        ("clip", {"input": ["x", {"image": "/etc/hostname"}]}, "not base64"),
        ("clip", {"input": [{"image": "file:///etc/hostname"}]}, "not fetched from addresses"),
        ("clip", {"input": [{"image": "YWJj"}]}, "text 0: a picture of 3 bytes is of no supported format"),
        ("clip", {"input": [{"image": ""}]}, "text 0: a picture has 0 bytes"),
        ("clip", {"input": [{"image": png(0)[:200]}]}, "text 0: a picture is damaged or cut off"),
        ("clip", {"input": [{"image": 3}]}, "an object with a text or an image"),
        ("clip", {"input": [{"image": png(0), "text": "x"}]}, "an object with a text or an image"),
        ("clip", {"messages": message("x", part(address(0)))}, "must be one text or one picture"),
        ("clip", {"messages": []}, "must be one text or one picture"),
        ("clip", {"messages": "x"}, "'messages' must be a list"),
        ("clip", {"messages": message("x"), "input": "x"}, "'input' or 'messages', not both"),
        ("clip", {"input": [{"image": png(0)}], "late_chunking": True}, "late chunking needs a model"),
    ],
)
def test_bad_pictures_are_refused_and_the_service_lives_on(
    packages: dict[str, Path], model: str, body: dict[str, Any], reason: str
) -> None:
    asked = {"model": model, **body}
    bad, good = answers(
        packages, ("/v1/embeddings", asked), ("/v1/embeddings", {"model": model, "input": "x"})
    )
    assert bad[0] == 400
    assert reason in bad[1]["error"]["message"]
    assert good[0] == 200
