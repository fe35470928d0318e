"""Programs that show pictures, on a model that sees: its tokens are those of transformers."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_serving import http_serving
from PIL import Image
from tiny_vlms import write_vlm
from vision_golden import NEW_TOKENS, golden_path, picture

from carryall import LLM, AsyncLLM
from carryall.program import assistant, gen, image, program, user
from carryall.runtime.tasks.export import export
from carryall.runtime.text.tokenizer import Tokenizer

OPTIONS: dict[str, Any] = {"max_slots": 3, "kv_cache_dtype": "float32", "provider": "cpu"}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    export(write_vlm(folder / "checkpoint"), folder / "package")
    return folder / "package"


def png() -> bytes:
    out = io.BytesIO()
    Image.fromarray(picture()).save(out, "PNG")
    return out.getvalue()


@program(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
def looks(s: Any, source: Any) -> None:
    s += user(image(source), "What is it?")
    for branch in s.fork(3):
        branch += assistant(gen("what"))
    s += assistant(gen("what"))


def check(model: Any, package: Path, source: Any) -> None:
    run = looks.run(model, source)
    expected = Tokenizer(package).decode(np.load(golden_path("smolvlm"))["tokens"].tolist())
    answers = [request.future.result() for request in run.requests()]
    assert [answer.text for answer in answers] == [expected] * 4
    # The picture is a part of the prefix that all branches share.
    assert sum(answer.usage.cached_tokens == 0 for answer in answers) <= 1
    assert run.messages[0]["content"][0]["type"] == "image_url"


FORMS: dict[str, Callable[[Path], Any]] = {
    "bytes": lambda folder: png(),
    "a file": lambda folder: folder / "picture.png",
    "its data": lambda folder: f"data:image/png;base64,{base64.b64encode(png()).decode()}",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_picture_is_seen_here(package: Path, tmp_path: Path, form: str) -> None:
    (tmp_path / "picture.png").write_bytes(png())
    with LLM(package, **OPTIONS) as llm:
        check(llm, package, FORMS[form](tmp_path))


def test_a_picture_is_seen_by_a_service(package: Path) -> None:
    async def scenario() -> None:
        llm = AsyncLLM(package, **OPTIONS)
        async with http_serving(llm) as served:
            await asyncio.to_thread(check, served.url, package, png())
        llm.shutdown()

    asyncio.run(scenario())
