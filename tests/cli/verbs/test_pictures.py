"""``--image`` of ``carryall run`` and ``carryall chat``, and pictures in the lines of ``carryall batch``."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from tiny_vlms import write_vlm
from video_golden import QUESTION as VIDEO_QUESTION
from video_golden import frames, video_path, write_checkpoint
from vision_golden import golden_path, picture

from carryall.cli import carryall
from carryall.runtime.tasks.export import export
from carryall.runtime.text.tokenizer import Tokenizer

GOLDEN = np.load(golden_path("smolvlm"))
QUESTION, NEW = "What is it?", 8
DAMAGED = "data:image/png;base64,aGk="
OPTIONS = ("--provider", "cpu", "--kv-cache-dtype", "float32")
GREEDY = (*OPTIONS, "--temperature", 0, "--max-tokens", NEW)


def run(*args: object, stdin: str = "") -> Result:
    return CliRunner().invoke(carryall, [str(arg) for arg in args], input=stdin)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sight")
    export(write_vlm(folder / "checkpoint"), folder / "package")
    return folder / "package"


@pytest.fixture(scope="module")
def answer(package: Path) -> str:
    return Tokenizer(package).decode(GOLDEN["tokens"][:NEW].tolist())


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.fromarray(picture()).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.mark.long
def test_run_answers_a_question_on_a_picture(package: Path, photo: Path, answer: str) -> None:
    result = run("run", package, QUESTION, "--image", photo, *GREEDY, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["token_ids"] == GOLDEN["tokens"][:NEW].tolist()
    assert found["prompt_tokens"] == len(GOLDEN["token_ids"])
    streamed = CliRunner().invoke(
        carryall, ["run", str(package), QUESTION, "--image", str(photo), *map(str, GREEDY)]
    )
    assert streamed.stdout_bytes.decode(errors="replace") == f"{answer}\n"


@pytest.mark.long
def test_chat_shows_the_picture_with_the_first_message(package: Path, photo: Path, answer: str) -> None:
    result = run("chat", package, "--image", photo, *GREEDY, stdin=f"{QUESTION}\n")
    assert result.exit_code == 0, result.output
    assert answer in result.stdout


@pytest.mark.parametrize("verb", ["run", "chat"])
@pytest.mark.parametrize("stdin", ["", " \n\n"])
def test_a_picture_without_a_message_is_an_error(package: Path, photo: Path, verb: str, stdin: str) -> None:
    result = run(verb, package, "--image", photo, *OPTIONS, stdin=stdin)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "there is no message" in result.stderr
    assert "carryall run MODEL PROMPT" in result.stderr


@pytest.mark.long
def test_a_checkpoint_folder_sees_too(tmp_path: Path, photo: Path) -> None:
    result = run("run", write_vlm(tmp_path / "vlm"), QUESTION, "--image", photo, *GREEDY, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["token_ids"] == GOLDEN["tokens"][:NEW].tolist()


@pytest.mark.long
def test_a_batch_reads_pictures_of_its_lines(package: Path, photo: Path, tmp_path: Path, answer: str) -> None:
    urls = [
        f"data:image/png;base64,{base64.b64encode(photo.read_bytes()).decode()}",
        DAMAGED,
        f"file:{photo.name}",
        "file:../photo.png",
    ]
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": url}},
                            {"type": "text", "text": QUESTION},
                        ],
                    }
                ],
                "temperature": 0,
                "max_tokens": NEW,
            },
        }
        for number, url in enumerate(urls)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    result = run("batch", "run", tmp_path / "in.jsonl", "-o", out, "--model", package, *OPTIONS)
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    by_id = {line["custom_id"]: line for line in found}
    assert by_id["0"]["response"]["body"]["choices"][0]["message"]["content"] == answer, result.output
    assert by_id["2"]["response"]["body"]["choices"][0]["message"]["content"] == answer
    errors = (tmp_path / "out.errors.jsonl").read_text(encoding="utf-8")
    assert "no supported format" in errors
    assert "'file:../photo.png' is not in the folder" in errors
    assert result.exit_code == 1


@pytest.mark.long
def test_a_batch_reads_pictures_in_a_column_of_a_table(
    package: Path, photo: Path, tmp_path: Path, answer: str
) -> None:
    pytest.importorskip("pyarrow")
    source, out = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text(f"id,scan\na,{photo.name}\nb,nowhere.png\n", encoding="utf-8")
    columns = ("--template", QUESTION, "--as", "chat", "--id-column", "id", "--image-column", "scan")
    result = run("batch", "run", source, "-o", out, "--model", package, *GREEDY, *columns)
    (found,) = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert found["response"]["body"]["choices"][0]["message"]["content"] == answer, result.output
    assert "'file:nowhere.png' names no file" in (tmp_path / "out.errors.jsonl").read_text(encoding="utf-8")


@pytest.mark.long
def test_run_shows_a_video_at_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    export(write_checkpoint(tmp_path / "checkpoint", "smolvlm"), tmp_path / "package")
    film = tmp_path / "film.mkv"
    with av.open(str(film), "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=4)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "bgr0"
        for frame in frames("smolvlm"):
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="bgr0"))
            )
        container.mux(stream.encode())
    tokens = np.load(video_path("smolvlm"))["tokens"][:NEW].tolist()
    result = run("run", tmp_path / "package", VIDEO_QUESTION, "--video", f"{film}#4", *GREEDY, "--json")
    assert json.loads(result.stdout)["choices"][0]["text"] == Tokenizer(tmp_path / "package").decode(tokens)
    slower = run("run", tmp_path / "package", VIDEO_QUESTION, "--video", film, *GREEDY, "--json")
    assert json.loads(slower.stdout)["prompt_tokens"] < json.loads(result.stdout)["prompt_tokens"]
    for name, why in ((f"{film}#x", "not a valid float"), (f"{film}#0", "not in the range"), ("no", "no")):
        refused = run("run", tmp_path / "package", VIDEO_QUESTION, "--video", name)
        assert (refused.exit_code, why in refused.output) == (2, True)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--raw",), "--raw excludes --image"),
        (("--image", "nowhere.png"), "nowhere.png"),
        (("--max-images", "0"), "a conversation has 1 pictures; the limit is 0"),
        (("--max-image-pixels", "10"), "more than 10 pixels in all"),
    ],
)
def test_pictures_that_cannot_be_shown_are_refused(
    package: Path, photo: Path, args: tuple[str, ...], why: str
) -> None:
    result = run("run", package, QUESTION, "--image", photo, *args)
    assert result.exit_code == 2
    assert why in result.output


@pytest.mark.long
def test_a_pdf_file_is_all_of_its_pages_or_one(package: Path, tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2")
    pages = [Image.fromarray(picture(50, 90, shift)) for shift in (0, 80)]
    path = tmp_path / "scan.pdf"
    pages[0].save(path, save_all=True, append_images=pages[1:], resolution=150)

    def asked(image: object) -> tuple[list[int], int]:
        result = run("run", package, QUESTION, "--image", image, *GREEDY, "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        return found["token_ids"], found["prompt_tokens"]

    (first, one), (second, _), (_, both) = (asked(f"{path}{page}") for page in ("#1", "#2", ""))
    assert first != second
    assert both > 1.5 * one
    for page, why in (
        ("#3", "there is no page 3"),
        ("#0", "pages count from 1"),
        ("#a", "pages count from 1"),
    ):
        result = run("run", package, QUESTION, "--image", f"{path}{page}", *GREEDY)
        assert result.exit_code != 0
        assert why in result.output
