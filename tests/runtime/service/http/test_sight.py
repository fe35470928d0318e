"""A picture reaches a model through every door of the service, and all doors give one answer."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_serving import HttpServed, http_serving
from internet import Net, found, says
from PIL import Image
from tiny_models import write_tiny
from tiny_vlms import SPECIAL, write_vlm
from vision_golden import golden_path, picture

from carryall import LLM, AsyncLLM, SamplingParams
from carryall.runtime.images.pdf import pictures_of
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import load_served_model
from carryall.runtime.tasks.export import export
from carryall.runtime.text.tokenizer import Tokenizer

Json = dict[str, Any]
GOLDEN = np.load(golden_path("smolvlm"))
LENGTH, NEW = len(GOLDEN["token_ids"]), 12
QUESTION = "What is it?"


def png() -> str:
    out = io.BytesIO()
    Image.fromarray(picture()).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


DATA = png()
URL = f"data:image/png;base64,{DATA}"
TEXT = {"type": "text", "text": QUESTION}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sight")
    export(write_vlm(folder / "checkpoint"), folder / "package")
    return folder / "package"


@pytest.fixture(scope="module")
def answer(package: Path) -> str:
    return Tokenizer(package).decode(GOLDEN["tokens"][:NEW].tolist())


@asynccontextmanager
async def served(package: Path) -> AsyncIterator[HttpServed]:
    llm = AsyncLLM(package, max_slots=2, provider="cpu", kv_cache_dtype="float32")
    try:
        async with http_serving(llm) as service:
            yield service
    finally:
        llm.shutdown()


def user(*content: Json) -> list[Json]:
    return [{"role": "user", "content": list(content)}]


def openai_chat(given: Json) -> tuple[str, int]:
    return given["choices"][0]["message"]["content"], given["usage"]["prompt_tokens"]


def responses(given: Json) -> tuple[str, int]:
    return given["output"][0]["content"][0]["text"], given["usage"]["input_tokens"]


def anthropic(given: Json) -> tuple[str, int]:
    usage = given["usage"]
    return given["content"][0]["text"], usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)


def ollama_chat(given: Json) -> tuple[str, int]:
    return given["message"]["content"], given["prompt_eval_count"]


def ollama_generate(given: Json) -> tuple[str, int]:
    return given["response"], given["prompt_eval_count"]


def kserve(given: Json) -> tuple[str, int]:
    return given["text_output"], given["num_input_tokens"]


PART = {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
INPUT = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": QUESTION}]
GREEDY = {"temperature": 0, "max_tokens": NEW}
OPTIONS = {"temperature": 0, "num_predict": NEW}
OLLAMA = {"role": "user", "content": QUESTION, "images": [DATA]}


def doors(question: str) -> list[tuple[str, Json, Any]]:
    """The path, body and reader of the answer of every door at which a question on a picture is asked."""
    text = {"type": "text", "text": question}
    given = [INPUT[0], {"type": "input_text", "text": question}]
    return [
        ("/v1/chat/completions", {"messages": user(PART, text), **GREEDY, "ignore_eos": True}, openai_chat),
        ("/v1/responses", {"input": user(*given), "temperature": 0, "max_output_tokens": NEW}, responses),
        ("/v1/messages", {"messages": user(BLOCK, text), **GREEDY}, anthropic),
        (
            "/api/chat",
            {"messages": [{**OLLAMA, "content": question}], "options": OPTIONS, "stream": False},
            ollama_chat,
        ),
        (
            "/api/generate",
            {"prompt": question, "images": [DATA], "options": OPTIONS, "stream": False},
            ollama_generate,
        ),
        (
            "/v2/models/toy/generate",
            {"text_input": question, "image": [DATA], "return_num_input_tokens": True, **GREEDY},
            kserve,
        ),
    ]


DOORS = doors(QUESTION)


@pytest.mark.long
def test_every_door_gives_the_answer_of_the_picture_and_counts_its_tokens(package: Path, answer: str) -> None:
    async def scenario() -> None:
        async with served(package) as service:
            for path, body, read in DOORS:
                given = await service.post(path, **body)
                assert given.status_code == 200, (path, given.text)
                text, count = read(given.json())
                assert (path, text, count) == (path, answer, LENGTH)

    asyncio.run(scenario())


@pytest.mark.long
def test_special_tokens_that_a_user_types_stay_text_at_every_door(package: Path) -> None:
    """A typed place for a picture ends no service, and takes no picture's rows (vLLM #57740)."""
    typed = "".join(SPECIAL)  # a byte is a token where it is text
    length = LENGTH + len(typed)

    async def scenario() -> None:
        async with served(package) as service:
            answers = set()
            for path, body, read in doors(QUESTION + typed):
                given = await service.post(path, **body)
                assert given.status_code == 200, (path, given.text)
                text, count = read(given.json())
                assert (path, count) == (path, length)
                answers.add(text)
            assert len(answers) == 1
            alone = [
                ("/v1/chat/completions", {"messages": user({"type": "text", "text": typed}), **GREEDY}),
                ("/v1/messages", {"messages": user({"type": "text", "text": typed}), **GREEDY}),
                ("/api/chat", {"messages": [{"role": "user", "content": typed}], "stream": False}),
            ]
            for path, body in alone:
                assert (await service.post(path, **body)).status_code == 200, path
            # In a raw prompt they are tokens, of which those of pictures have embeddings of their own.
            raw: Json = {"inputs": typed, "parameters": {"max_new_tokens": 4}}
            assert (await service.post("/generate", **raw)).status_code == 200
            raw = {"prompt": typed, "max_tokens": 4}
            usage = (await service.post("/v1/completions", **raw)).json()["usage"]
            assert usage["prompt_tokens"] == len(SPECIAL)

    asyncio.run(scenario())


@pytest.mark.long
def test_the_client_of_openai_streams_an_answer_to_a_picture(package: Path, answer: str) -> None:
    async def scenario() -> None:
        async with served(package) as service:
            client = service.openai()
            (model,) = [each.id async for each in client.models.list()]
            stream = await client.chat.completions.create(
                model=model, messages=user(PART, TEXT), stream=True, **GREEDY, extra_body={"ignore_eos": True}
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            assert "".join(pieces) == answer

    asyncio.run(scenario())


@pytest.mark.long
def test_tenants_of_other_salts_share_no_computed_pictures(package: Path, answer: str) -> None:
    async def scenario() -> None:
        llm = AsyncLLM(package, max_slots=2, provider="cpu", kv_cache_dtype="float32")
        try:
            async with http_serving(llm) as service:
                counts = []
                for salt in ("a", "b", "a", None, "b", None):
                    path, body, read = DOORS[0]
                    given = await service.post(path, **body, **({"cache_salt": salt} if salt else {}))
                    assert read(given.json()) == (answer, LENGTH)
                    counts.append(llm.requests.sight._encoder.num_encoded)
                one = counts[0]
                assert counts == [one, 2 * one, 2 * one, 3 * one, 3 * one, 3 * one]
        finally:
            llm.shutdown()

    asyncio.run(scenario())


ADDRESS = "http://plain.example/page.png"
BY_URL = {"type": "image_url", "image_url": {"url": ADDRESS}}
INPUT_BY_URL = {"type": "input_image", "image_url": ADDRESS}
BLOCK_BY_URL = {"type": "image", "source": {"type": "url", "url": ADDRESS}}
ADDRESSED: list[tuple[str, Json, Any]] = [
    ("/v1/chat/completions", {**DOORS[0][1], "messages": user(BY_URL, TEXT)}, openai_chat),
    ("/v1/responses", {**DOORS[1][1], "input": user(INPUT_BY_URL, INPUT[1])}, responses),
    ("/v1/messages", {**DOORS[2][1], "messages": user(BLOCK_BY_URL, TEXT)}, anthropic),
]


@asynccontextmanager
async def fetching(model: Path, net: Net) -> AsyncIterator[HttpServed]:
    """A service that fetches pictures from one host of a net."""
    models = ModelRepository({"toy": lambda: load_served_model(model, provider="cpu")})
    allowed = ("http://plain.example",)
    async with net.behind(models.fetcher), http_serving(None, models, image_domains=allowed) as service:
        yield service


@pytest.mark.long
def test_pictures_of_allowed_hosts_are_fetched_at_every_door_of_addresses(package: Path) -> None:
    net = Net(says(found(base64.b64decode(DATA))))

    async def scenario() -> None:
        async with fetching(package, net) as service:
            for (path, body, read), (_, whole, _) in zip(ADDRESSED, DOORS, strict=False):
                given, expected = await service.post(path, **body), await service.post(path, **whole)
                assert given.status_code == 200, (path, given.text)
                assert (path, read(given.json())) == (path, read(expected.json()))
            assert len(net.asked) == len(ADDRESSED)
            counted = await service.post("/v1/messages/count_tokens", messages=ADDRESSED[2][1]["messages"])
            assert counted.json()["input_tokens"] == LENGTH
            low = {"type": "image_url", "image_url": {"url": ADDRESS, "detail": "low"}}
            given = await service.post(ADDRESSED[0][0], messages=user(low, TEXT), **GREEDY)
            assert given.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 4
            net.names["plain.example"] = [["10.0.0.1"]]
            refused = await service.post(ADDRESSED[0][0], **ADDRESSED[0][1])
            assert (refused.status_code, "not public" in refused.text) == (400, True)

    asyncio.run(scenario())


@pytest.mark.long
def test_a_model_that_reads_text_only_fetches_nothing(tmp_path: Path) -> None:
    net = Net(says(found(base64.b64decode(DATA))))

    async def scenario() -> None:
        async with fetching(write_tiny("llama", tmp_path), net) as service:
            given = await service.post(ADDRESSED[0][0], **ADDRESSED[0][1])
            assert (given.status_code, net.lookups) == (400, [])

    asyncio.run(scenario())


@pytest.mark.long
def test_usage_tells_the_size_in_which_the_model_sees_each_picture(package: Path) -> None:
    sizes, seen = ((50, 90), (90, 30)), []
    parts = []
    for height, width in sizes:
        out = io.BytesIO()
        Image.fromarray(picture(height, width)).save(out, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
        # the processor of the checkpoint: longest edge 96, then up to whole tiles of 32
        grid = [-(-round(96 * edge / max(height, width)) // 32) for edge in (height, width)]
        tiles = grid[0] * grid[1] + 1
        seen.append({"width": 32 * grid[1], "height": 32 * grid[0], "tokens": 4 * tiles})
    body = {"messages": user(*parts, TEXT), **GREEDY}

    async def scenario() -> None:
        async with served(package) as service:
            usage = (await service.post("/v1/chat/completions", **body)).json()["usage"]
            asked = {"stream": True, "stream_options": {"include_usage": True}}
            events = await service.events("/v1/chat/completions", **body, **asked)
            text = (await service.post("/v1/chat/completions", messages=user(TEXT), **GREEDY)).json()["usage"]
            details = usage["prompt_tokens_details"]
            assert details["images"] == seen
            assert details["image_tokens"] == sum(each["tokens"] for each in seen) < usage["prompt_tokens"]
            assert events[-2]["usage"]["prompt_tokens_details"]["images"] == seen
            assert text["prompt_tokens_details"].keys() == {"cached_tokens"}

    asyncio.run(scenario())


@pytest.mark.long
def test_the_detail_of_a_request_changes_the_tokens_of_a_picture(package: Path) -> None:
    """In SmolVLM low detail is the whole picture in one tile, of 4 tokens here."""
    low_part = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    low_input = {"type": "input_image", "image_url": URL, "detail": "low"}
    chat, response = "/v1/chat/completions", "/v1/responses"

    async def scenario() -> None:
        async with served(package) as service:
            usual = (await service.post(chat, messages=user(PART, TEXT), **GREEDY)).json()
            low = (await service.post(chat, messages=user(low_part, TEXT), **GREEDY)).json()
            body = {"input": user(low_input, INPUT[1]), "temperature": 0, "max_output_tokens": NEW}
            same = (await service.post(response, **body)).json()
            sizes = [each["usage"]["prompt_tokens_details"]["images"] for each in (usual, low)]
            assert sizes == [
                [{"width": 96, "height": 64, "tokens": 28}],
                [{"width": 32, "height": 32, "tokens": 4}],
            ]
            assert same["usage"]["input_tokens_details"]["images"] == sizes[1]
            assert responses(same)[0] == openai_chat(low)[0]
            odd: Json = {"type": "image_url", "image_url": {"url": URL, "detail": "best"}}
            refused = await service.post(chat, messages=user(odd, TEXT), **GREEDY)
            assert (refused.status_code, "'detail' must be low" in refused.text) == (400, True)
            odd = {**PART, "max_pixels": 1000}
            refused = await service.post(chat, messages=user(odd, TEXT), **GREEDY)
            assert (refused.status_code, "takes no 'min_pixels'" in refused.text) == (400, True)

    asyncio.run(scenario())


BAD: list[tuple[str, Json, str]] = [
    ("url", {"url": "https://example.org/a.png"}, "not fetched from addresses"),
    ("local", {"url": "file:///etc/passwd"}, "not fetched from addresses"),
    ("base64", {"url": "data:image/png;base64,%%%"}, "not base64"),
    ("text", {"url": "data:image/png;base64,aGVsbG8="}, "no supported format"),
    ("empty", {"url": "data:image/png;base64,"}, "0 bytes"),
    ("cut", {"url": f"data:image/png;base64,{DATA[:200]}"}, "damaged or cut off"),
]


@pytest.mark.long
def test_a_bad_picture_is_a_400_that_says_why_and_the_service_lives_on(package: Path, answer: str) -> None:
    async def scenario() -> None:
        async with served(package) as service:
            for name, image, why in BAD:
                body = {"messages": user({"type": "image_url", "image_url": image}, TEXT), **GREEDY}
                given = await service.post("/v1/chat/completions", **body)
                assert (name, given.status_code) == (name, 400)
                assert why in given.json()["error"]["message"], name
            path, body, read = DOORS[0]
            assert read((await service.post(path, **body)).json()) == (answer, LENGTH)

    asyncio.run(scenario())


@pytest.mark.long
def test_raw_prompts_and_tensors_of_another_kind_refuse_pictures(package: Path) -> None:
    bodies: list[tuple[str, Json, str]] = [
        ("/generate", {"inputs": f"![]({URL}){QUESTION}"}, "raw prompt"),
        ("/v2/models/toy/generate", {"text_input": QUESTION, "image": [1]}, "a string or a list of them"),
        ("/v2/models/toy/generate", {"text_input": QUESTION, "image": "%"}, "not base64"),
        ("/v2/models/toy/generate", {"text_input": [QUESTION], "image": DATA}, "must be a string, not"),
    ]
    models = ModelRepository({"toy": lambda: load_served_model(package, provider="cpu")})

    async def scenario() -> None:
        async with http_serving(None, models) as service:
            for path, body, why in bodies:
                given = await service.post(path, **body)
                assert (given.status_code, why in given.text) == (400, True), given.text

    asyncio.run(scenario())


def pdf() -> str:
    first, second = (Image.fromarray(picture(50, 90, shift)) for shift in (0, 80))
    out = io.BytesIO()
    first.save(out, "PDF", save_all=True, append_images=[second], resolution=150)
    return base64.b64encode(out.getvalue()).decode()


@pytest.mark.long
def test_a_pdf_file_is_its_pages_at_every_door(package: Path) -> None:
    pytest.importorskip("pypdfium2")
    data = pdf()
    url, asked = f"data:application/pdf;base64,{data}", {"type": "input_text", "text": QUESTION}
    media = {"type": "base64", "media_type": "application/pdf", "data": data}
    file = {"type": "file", "file": {"filename": "scan.pdf", "file_data": url}}
    named = {"type": "input_file", "filename": "scan.pdf", "file_data": url}
    doors: list[tuple[str, Json, Any]] = [
        ("/v1/chat/completions", {"messages": user(file, TEXT), **GREEDY, "ignore_eos": True}, openai_chat),
        (
            "/v1/responses",
            {"input": user(named, asked), "temperature": 0, "max_output_tokens": NEW},
            responses,
        ),
        (
            "/v1/messages",
            {"messages": user({"type": "document", "source": media}, TEXT), **GREEDY},
            anthropic,
        ),
        (
            "/api/chat",
            {"messages": [{**OLLAMA, "images": [data]}], "options": OPTIONS, "stream": False},
            ollama_chat,
        ),
    ]
    pages = list(pictures_of(base64.b64decode(data)))
    with LLM(package, provider="cpu", kv_cache_dtype="float32") as llm:
        seen = [{"type": "image", "image": page} for page in pages]
        (output,) = llm.chat(
            user(*seen, TEXT), SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        )
        (whole,) = llm.chat(
            user({"type": "image", "image": base64.b64decode(data)}, TEXT),
            SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True),
        )
    expected = (output.outputs[0].text, len(output.prompt_token_ids))
    assert (whole.outputs[0].text, len(whole.prompt_token_ids)) == expected

    async def scenario() -> None:
        async with served(package) as service:
            for path, body, read in doors:
                given = await service.post(path, **body)
                assert given.status_code == 200, (path, given.text)
                assert (path, *read(given.json())) == (path, *expected)
            damaged = {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0xLjc="}}
            by_id = {"type": "file", "file": {"file_id": "file-1"}}
            for part, why in ((damaged, "damaged or encrypted"), (by_id, "'file_id' are not read")):
                given = await service.post("/v1/chat/completions", messages=user(part, TEXT), **GREEDY)
                assert given.status_code == 400
                assert why in given.json()["error"]["message"]


@pytest.mark.parametrize("sees", [True, False])
def test_ollamas_clients_are_told_whether_a_model_sees(package: Path, sees: bool, tmp_path: Path) -> None:
    model: Path | str = package if sees else write_tiny("llama", tmp_path)
    models = ModelRepository({"toy": lambda: load_served_model(model, provider="cpu")})

    async def scenario() -> None:
        async with http_serving(None, models) as service:
            shown = (await service.post("/api/show", model="toy")).json()
            assert ("vision" in shown["capabilities"]) == sees
            assert shown["capabilities"][:2] == ["completion", "tools"]

    asyncio.run(scenario())
