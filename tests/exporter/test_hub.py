"""The huggingface_hub client against a local HTTP server in place of the hub."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_stand_in import StandIn, hub_environment, hub_of
from tiny_models import write_tiny

from carryall.errors import MissingExtraError, ModelNotFoundError
from carryall.exporter import hub
from carryall.exporter.export import export_model


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    folder = write_tiny("llama", tmp_path / "repository")
    (folder / "consolidated.safetensors").write_bytes(b"not wanted")
    (folder / "onnx").mkdir()
    for name in ("model_q4.onnx", "model_q4.onnx_data", "model_fp16.onnx"):
        (folder / "onnx" / name).write_text(name)
    with hub_of(folder) as address:
        yield address


def download_elsewhere(hub_id: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run ``hub.download`` in a new process, because huggingface_hub reads its settings when imported."""
    code = f"from carryall.exporter import hub; print(hub.download({hub_id!r}))"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=hub_environment(endpoint, home),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.long
def test_a_hub_id_becomes_a_checkpoint_folder(endpoint: str, tmp_path: Path) -> None:
    finished = download_elsewhere("org/tiny", endpoint, tmp_path / "home")
    assert finished.returncode == 0, finished.stderr
    folder = Path(finished.stdout.strip())
    assert export_model(folder).graph.name == "llama"
    assert not (folder / "consolidated.safetensors").exists()
    assert not any("consolidated" in path for path in StandIn.requested)


@pytest.mark.long
def test_a_part_of_a_repository_is_downloaded_and_found_again_without_the_hub(
    endpoint: str, tmp_path: Path
) -> None:
    for where in (endpoint, "http://127.0.0.1:9"):
        finished = download_elsewhere("org/tiny@main:q4", where, tmp_path / "home")
        assert finished.returncode == 0, finished.stderr
        path = Path(finished.stdout.strip())
        assert path.parts[-2:] == ("onnx", "model_q4.onnx")
    snapshot = path.parent.parent
    found = {file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file()}
    assert found > {"config.json", "tokenizer.json", "onnx/model_q4.onnx", "onnx/model_q4.onnx_data"}
    assert not any(name.endswith(("fp16.onnx", ".safetensors")) for name in found)


SIDE = ["config.json", "tokenizer.json", "README.md"]
ONNX = [*SIDE, "onnx/model.onnx", "onnx/model.onnx_data", "onnx/model_q4.onnx", "onnx/model_q4f16.onnx"]
SHARDS = ["x-Q8_0-00001-of-00002.gguf", "x-Q8_0-00002-of-00002.gguf"]
GGUF = ["README.md", "x-Q4_K_M.gguf", *SHARDS]
TOWERS = [f"mmproj-x-{kind}.gguf" for kind in ("Q8_0", "BF16", "f16", "F32")]
GENAI = [*(f"cpu/{name}" for name in ("genai_config.json", "model.onnx", "vocab.txt")), "gpu/x.onnx"]


@pytest.mark.parametrize(
    ("names", "part", "place", "wanted"),
    [
        ([*SIDE, "model.safetensors", "onnx/model.onnx"], None, ".", {*SIDE[:2], "model.safetensors"}),
        ([*SIDE, "v2/model.safetensors"], "v2", "v2", {*SIDE[:2], "v2/model.safetensors"}),
        (ONNX, None, "onnx/model.onnx", {*SIDE[:2], "onnx/model.onnx", "onnx/model.onnx_data"}),
        (ONNX, "q4", "onnx/model_q4.onnx", {*SIDE[:2], "onnx/model_q4.onnx"}),
        (ONNX, "onnx/model_q4f16.onnx", "onnx/model_q4f16.onnx", {*SIDE[:2], "onnx/model_q4f16.onnx"}),
        (GGUF, "Q4_K_M", "x-Q4_K_M.gguf", {"x-Q4_K_M.gguf"}),
        (GGUF, "q8_0", SHARDS[0], {*SHARDS}),
        ([*GGUF, *TOWERS], "Q4_K_M", "x-Q4_K_M.gguf", {"x-Q4_K_M.gguf", TOWERS[2]}),
        ([*GGUF, *TOWERS[:2], *TOWERS[3:]], "q8_0", SHARDS[0], {*SHARDS, TOWERS[1]}),
        ([*GGUF, TOWERS[0]], "Q4_K_M", "x-Q4_K_M.gguf", {"x-Q4_K_M.gguf", TOWERS[0]}),
        ([*GGUF, "y/mmproj-F16.gguf"], "Q4_K_M", "x-Q4_K_M.gguf", {"x-Q4_K_M.gguf"}),
        (GENAI, "cpu", "cpu", {*GENAI[:3]}),
    ],
)  # fmt: skip
def test_the_expected_files_of_a_repository_are_chosen(
    names: list[str], part: str | None, place: str, wanted: set[str]
) -> None:
    found = hub.choose(dict.fromkeys(names), part, "org/x")
    assert (found[0], set(found[1])) == (place, wanted)


@pytest.mark.parametrize(
    ("sizes", "memory", "place"),
    [
        ({"x-Q8_0.gguf": 8, "x-Q4_K_M.gguf": 5, "x-Q4_0.gguf": 4, "mmproj-x-f16.gguf": 9}, None, "Q4_K_M"),
        ({"x-Q8_0.gguf": 8, "x-Q4_K_M.gguf": 5, "x-Q2_K.gguf": 3}, 6, "Q2_K"),
        ({"x-Q8_0.gguf": 8, "x-Q4_K_M.gguf": 4, "x-Q2_K.gguf": 3}, 5, "Q4_K_M"),
        ({"x.Q8_0.gguf": 8, "x.q6_k.gguf": 6}, 20, "q6_k"),
    ],
)
def test_of_several_types_the_first_that_fits_is_chosen(
    sizes: dict[str, int | None], memory: int | None, place: str
) -> None:
    found, wanted = hub.choose(sizes, None, "org/x", memory)
    assert place in found
    assert wanted == [found, *(name for name in sizes if "mmproj" in name)]


def test_shards_are_one_file_of_their_total_size() -> None:
    sizes: dict[str, int | None] = {**dict.fromkeys(SHARDS, 5), "x-F16.gguf": 20}
    assert hub.choose(sizes, None, "org/x", 13) == (SHARDS[0], SHARDS)
    with pytest.raises(ModelNotFoundError, match="Q8_0, has 10 B and runs in about 12 B, and it has 12 B"):
        hub.choose(sizes, None, "org/x", 12)


@pytest.mark.parametrize(
    ("names", "part", "words"),
    [
        (
            [*GGUF, "y-Q4_K_M.gguf"],
            None,
            f"several models; name one as org/x:FILE: x-Q4_K_M.gguf, {SHARDS[0]}",
        ),
        (["x-TQ9_9.gguf", "x-Q5_1.gguf"], None, "several models"),  # an unknown ending may be another model
        (GGUF, "q5", "holds nothing that matches ':q5'; name one as org/x:FILE: x-Q4_K_M.gguf"),
        (SIDE, "q4", "holds nothing that matches ':q4'; name one as org/x:FILE$"),
    ],
)
def test_an_undecided_choice_lists_the_models(names: list[str], part: str | None, words: str) -> None:
    with pytest.raises(ModelNotFoundError, match=words):
        hub.choose(dict.fromkeys(names), part, "org/x" + (f":{part}" if part else ""))


@pytest.mark.long
def test_an_unknown_model_is_named(endpoint: str, tmp_path: Path) -> None:
    finished = download_elsewhere("org/absent@v2", endpoint, tmp_path / "home")
    assert finished.returncode == 1
    assert "there is no file or folder 'org/absent@v2', and the Hugging Face hub cannot" in finished.stderr


def test_an_unreachable_hub_is_named(tmp_path: Path) -> None:
    finished = download_elsewhere("org/tiny", "http://127.0.0.1:9", tmp_path / "home")
    assert finished.returncode == 1
    assert "there is no file or folder 'org/tiny', and the Hugging Face hub cannot" in finished.stderr


def test_without_huggingface_hub_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'carryall\[hub\]'"):
        hub.download("org/tiny")


@pytest.mark.parametrize("name", ["org", "a/b/c", "org/name@", "", "../x y", "org/name:"])
def test_other_names_are_not_hub_ids(name: str) -> None:
    assert not hub.is_hub_id(name)
    with pytest.raises(ModelNotFoundError):
        hub.download(name)
