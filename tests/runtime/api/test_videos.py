"""Videos in conversations: ids, positions and tokens equal transformers, by whichever way frames come."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_serving import http_serving
from PIL import Image
from tiny_vlms import write_vlm
from video_golden import FAMILIES, FPS, NEW_TOKENS, QUESTION, frames, video_path, write_checkpoint

from carryall import LLM, AsyncLLM, SamplingParams
from carryall.errors import ChatTemplateError, MissingExtraError, RequestError
from carryall.runtime.images.video import MOST_FRAMES, open_video
from carryall.runtime.tasks.export import export
from carryall.runtime.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
TEXT = {"type": "text", "text": QUESTION}
Json = dict[str, Any]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def package(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("video")
    export(write_checkpoint(folder / "checkpoint", family), folder / "package")
    return folder / "package"


def opened(package: Path, **options: Any) -> LLM:
    return LLM(package, **{"max_slots": 3, "kv_cache_dtype": "float32", "provider": "cpu", **options})


@pytest.fixture(scope="module")
def llm(package: Path) -> Iterator[LLM]:
    with opened(package) as model:
        yield model


def asked(video: Any, fps: float | None = FPS, **part: Any) -> list[Json]:
    rate = {} if fps is None else {"fps": fps}
    return [{"role": "user", "content": [{"type": "video", "video": video, **rate, **part}, TEXT]}]


def answer(llm: LLM, messages: list[Json]) -> tuple[list[int], list[int]]:
    (output,) = llm.chat(messages, GREEDY)
    output.check()
    return output.prompt_token_ids, output.outputs[0].token_ids


def png(pixels: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def golden_of(family: str) -> dict[str, Any]:
    """What transformers computed."""
    with np.load(video_path(family)) as file:
        return dict(file)


@pytest.mark.long
def test_tokens_equal_transformers(llm: LLM, family: str) -> None:
    golden = golden_of(family)
    prompt, tokens = answer(llm, asked(frames(family)))
    assert prompt == golden["token_ids"].tolist()
    assert tokens == golden["tokens"].tolist()


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{"max_step_tokens": 16}, {"provider_options": {"kernels": "onnxruntime"}}]
)
def test_tokens_are_the_same_in_chunks_and_with_other_kernels(
    package: Path, family: str, options: Json
) -> None:
    golden = golden_of(family)
    with opened(package, **options) as llm:
        assert answer(llm, asked(frames(family)))[1] == golden["tokens"].tolist()


@pytest.mark.long
def test_frames_may_come_in_any_form(llm: LLM, family: str) -> None:
    seen = frames(family)
    wanted = answer(llm, asked(seen))
    urls = [f"data:image/png;base64,{base64.b64encode(png(frame)).decode()}" for frame in seen]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    for video in (np.stack(seen), [Image.fromarray(frame) for frame in seen], urls, parts):
        assert answer(llm, asked(video)) == wanted


@pytest.mark.long
def test_a_service_takes_frames(package: Path, family: str) -> None:
    golden = golden_of(family)
    urls = [f"data:image/png;base64,{base64.b64encode(png(each)).decode()}" for each in frames(family)]
    content = [{"type": "video", "video": urls, "fps": FPS}, TEXT]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": NEW_TOKENS}
    refused = [{"type": "video", "video": ["/etc/passwd"], "fps": FPS}, TEXT]
    llm = AsyncLLM(package, provider="cpu", kv_cache_dtype="float32")

    async def scenario() -> None:
        async with http_serving(llm) as service:
            given = (await service.post("/v1/chat/completions", **body, ignore_eos=True)).json()
            wanted = Tokenizer(package).decode(golden["tokens"].tolist())
            assert given["choices"][0]["message"]["content"] == wanted
            assert given["usage"]["prompt_tokens"] == len(golden["token_ids"])
            messages = [{"role": "user", "content": refused}]
            bad = await service.post("/v1/chat/completions", messages=messages)
            assert (bad.status_code, "not fetched from addresses" in bad.text) == (400, True)

    try:
        asyncio.run(scenario())
    finally:
        llm.shutdown()


@pytest.mark.long
def test_another_frame_or_rate_is_another_video_and_the_same_is_cached(llm: LLM, family: str) -> None:
    seen = frames(family)
    prompt, tokens = answer(llm, asked(seen))
    encoded = llm.requests.sight._encoder.num_encoded
    assert answer(llm, asked(seen)) == (prompt, tokens)
    assert llm.requests.sight._encoder.num_encoded == encoded
    assert answer(llm, asked([*seen[:-1], 255 - seen[-1]]))[1] != tokens
    # Qwen2-VL and LLaVA-NeXT-Video do not tell the model how fast frames follow each other
    timeless = ("qwen2_vl", "llava_next_video")
    assert (answer(llm, asked(seen, fps=0.5))[1] != tokens) == (family not in timeless)


@pytest.mark.long
def test_positions_equal_transformers(llm: LLM, family: str) -> None:
    golden = golden_of(family)
    if "positions" not in golden:
        pytest.skip("positions have one axis")
    prompt = llm.requests.chat_prompt(asked(frames(family)))
    assert prompt.images is not None
    assert prompt.images.positions is not None
    assert prompt.images.positions.tolist() == golden["positions"].tolist()


@pytest.mark.long
def test_text_may_name_what_stands_for_a_video(llm: LLM, family: str) -> None:
    seen = frames(family)
    prompt, _ = answer(llm, asked(seen))
    messages = asked(seen)
    typed = "<|video_pad|>" if family != "smolvlm" else "<image>"
    messages[0]["content"].append({"type": "text", "text": f" {typed}"})
    longer, _ = answer(llm, messages)
    assert len(longer) == len(prompt) + 1 + len(typed)  # bytes


@pytest.mark.long
def test_a_family_of_pictures_refuses_videos(tmp_path: Path) -> None:
    export(write_vlm(tmp_path / "checkpoint", "llava"), tmp_path / "package")
    with opened(tmp_path / "package") as llm, pytest.raises(RequestError, match="reads pictures, not videos"):
        llm.chat(asked(frames("smolvlm")))


@pytest.mark.long
@pytest.mark.parametrize(
    ("video", "fps", "why"),
    [
        ([], 1, "a video of 0 frames"),
        ([np.zeros((8, 8, 3), np.uint8)] * (MOST_FRAMES + 1), 1, f"from 1 to {MOST_FRAMES}"),
        ([np.zeros((8, 8, 3), np.uint8), np.zeros((8, 9, 3), np.uint8)], 1, "2 sizes"),
        ([np.zeros((2000, 2000, 3), np.uint8)] * 80, 1, "exceeds the limit"),
        ([np.zeros((8, 8, 3), np.uint8)], 0, "'fps' of a video"),
        ([np.zeros((8, 8, 3), np.uint8)], float("nan"), "'fps' of a video"),
        ([np.zeros((8, 8, 3), np.uint8)], True, "'fps' of a video"),
        ([np.zeros((8, 8, 3), np.uint8)], "2", "'fps' of a video"),
        ([b"no picture"], 1, "no supported format"),
        (5, 1, "must be a list of frames"),
        ({"a": 1}, 1, "must be a list of frames"),
    ],
    ids=str,
)
def test_a_bad_video_says_why(video: Any, fps: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        open_video(video, fps)


def test_addresses_of_videos_are_not_fetched() -> None:
    from carryall.runtime.api.sight import _video

    for part in ({"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}},
                 {"type": "video", "video": "https://example.org/a.mp4"}):  # fmt: skip
        with pytest.raises(RequestError, match="not fetched from addresses"):
            _video(part)


def film(rate: int, count: int) -> bytes:
    """Write a file of ``count`` frames, each of a gray of its own, without loss."""
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "gray"
        for number in range(count):
            gray = np.full((16, 32), 10 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(gray, format="gray")))
        container.mux(stream.encode())
    return out.getvalue()


@pytest.mark.parametrize(("fps", "grays"), [(2, [0, 50, 100, 150]), (10, range(0, 200, 10)), (0.5, [0])])
def test_frames_of_a_file_are_taken_at_equal_distances(fps: float, grays: Any) -> None:
    video = open_video(film(10, 20), fps)
    assert [int(frame.mean()) for frame in video.frames] == list(grays)
    assert video.duration == pytest.approx(2.0)
    assert [video.seconds(number) for number in range(2)] == [0, 1 / fps]


def test_a_file_that_is_no_video_says_so() -> None:
    pytest.importorskip("av")
    for data in (b"", b"no video", film(10, 4)[:200], png(np.zeros((16, 16, 3), np.uint8))[:30]):
        with pytest.raises(RequestError, match=r"damaged or of no supported format|no frames|no stream"):
            open_video(data)


def test_files_need_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"carryall\[video\]"):
        open_video(b"x")


@pytest.mark.long
def test_a_template_without_a_place_for_videos_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "smolvlm")
    export(checkpoint, tmp_path / "package")
    template = "{% for message in messages %}{{ message['content'][1]['text'] }}{% endfor %}"
    with opened(tmp_path / "package") as llm, pytest.raises(ChatTemplateError, match="0 places '<video>'"):
        llm.chat(asked(frames("smolvlm")), chat_template=template)
