"""Folders of other tools, and the files they resolve to."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_gguf
from tiny_models import write_tiny

from carryall import LLM, SamplingParams, optimize
from carryall.errors import CheckpointError, ModelNotFoundError
from carryall.exporter.export import export_package
from carryall.exporter.package import Package
from carryall.runtime.models.find import find_model, side_folder
from carryall.runtime.models.generation_defaults import GenerationDefaults
from carryall.runtime.models.model_source import resolve_model

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    return export_package(write_tiny("llama", folder / "tiny"), folder / "package").path


@pytest.fixture
def folder(package: Path, tmp_path: Path) -> Path:
    """A folder with the files of a package but no record: what Optimum writes."""
    shutil.copytree(package, tmp_path / "model", ignore=shutil.ignore_patterns("carryall.json"))
    return tmp_path / "model"


def optimum(folder: Path) -> Path:
    return folder / "model.onnx"


def transformers_js(folder: Path) -> Path:
    (folder / "onnx").mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (folder / name).rename(folder / "onnx" / name)
    return folder / "onnx" / "model.onnx"


def genai(folder: Path) -> Path:
    write_genai(folder)
    return folder / "decoder.onnx"


def mobius(folder: Path) -> Path:
    """Write what mobius writes with ``--runtime ort-genai``: an unrelated context length."""
    write_genai(folder, {"context_length": 4096})
    return folder / "decoder.onnx"


def write_genai(folder: Path, changes: dict[str, Any] | None = None) -> None:
    (folder / "model.onnx").rename(folder / "decoder.onnx")
    for name in ("config.json", "generation_config.json"):
        (folder / name).unlink()
    model = {
        "type": "llama",
        "context_length": 128,
        "vocab_size": 260,
        "bos_token_id": 256,
        "eos_token_id": [257, 258],
        "decoder": {"filename": "decoder.onnx", "head_size": 8},
        **(changes or {}),
    }
    search = {"do_sample": False, "top_k": 50, "max_length": 128}
    (folder / "genai_config.json").write_text(json.dumps({"model": model, "search": search}))


LAYOUTS = [optimum, transformers_js, genai, mobius]


def generate(model: Path) -> list[int]:
    with LLM(model, max_slots=1, context_length=64) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_other_tools_generate_the_same_tokens(
    layout: Callable[[Path], Path], folder: Path, package: Path
) -> None:
    graph = layout(folder)
    assert find_model(folder) == graph
    assert side_folder(graph) == folder
    assert generate(folder) == generate(package)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimized_layout_is_a_package(
    layout: Callable[[Path], Path], folder: Path, tmp_path: Path
) -> None:
    layout(folder)
    optimize(folder, tmp_path / "out", target="cpu")
    assert Package.open(tmp_path / "out").record.eos_token_ids == (
        (257,) if layout in LAYOUTS[:2] else (257, 258)
    )


def test_genai_s_sampling_defaults_are_used(folder: Path) -> None:
    genai(folder)
    source = resolve_model(folder)
    defaults = GenerationDefaults.from_folder(source.folder, lambda: source.config)
    assert defaults.params().greedy
    assert defaults.end_token_ids == {257, 258}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "does not hold a JSON object"),
        ("{}", "'model' must be an object"),
        (
            '{"model": {"decoder": {"filename": "../model.onnx"}}}',
            "must name a file of its folder, found '../model",
        ),
        ('{"model": {"decoder": {}}}', "must name a file of its folder, found None"),
    ],
)
def test_a_damaged_genai_config_is_named(folder: Path, content: str, words: str) -> None:
    (folder / "genai_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"genai_config.json.*{words}"):
        find_model(folder)


def test_a_graph_that_genai_names_must_exist(folder: Path) -> None:
    genai(folder).unlink()
    with pytest.raises(ModelNotFoundError, match=r"names the graph decoder\.onnx, which does not exist"):
        find_model(folder)


def test_several_graphs_without_a_default_are_listed(folder: Path) -> None:
    graph = transformers_js(folder)
    for name in ("model_q4.onnx", "model_fp16.onnx"):
        shutil.copy(graph, graph.with_name(name))
    assert find_model(folder) == graph
    graph.unlink()
    with pytest.raises(ModelNotFoundError, match=r"name one .*: onnx/model_fp16.onnx, onnx/model_q4.onnx"):
        find_model(folder)
    assert side_folder(find_model(folder / "onnx" / "model_q4.onnx")) == folder


def test_safetensors_come_before_graphs(folder: Path) -> None:
    transformers_js(folder)
    write_tiny("llama", folder)
    assert find_model(folder) == folder


def test_a_folder_of_one_gguf_file(tmp_path: Path) -> None:
    write_gguf("llama", tmp_path / "a.gguf", types="Q8_0", hidden_size=64, intermediate_size=96)
    assert find_model(tmp_path) == tmp_path / "a.gguf"
    assert resolve_model(tmp_path).model_path == tmp_path / "a.gguf"
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(ModelNotFoundError, match=r"several models; name one of its files: a\.gguf, b\.gguf"):
        find_model(tmp_path)


@pytest.mark.parametrize("name", ["mmproj-a-F16.gguf", "A-mmproj-f16.gguf"])
def test_a_vision_tower_beside_a_gguf_file_is_no_second_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "a-Q8_0.gguf").touch()
    (tmp_path / name).touch()
    assert find_model(tmp_path) == tmp_path / "a-Q8_0.gguf"
    (tmp_path / "a-Q8_0.gguf").unlink()
    assert find_model(tmp_path) == tmp_path / name  # the reader of its header says what it is


def test_a_folder_of_gguf_shards(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").touch()
    assert find_model(tmp_path) == tmp_path / "m-00001-of-00002.gguf"


def test_pickles_are_refused_with_the_safe_way(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for model in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(ModelNotFoundError, match=r"pickle \(pytorch_model\.bin\).*save_pretrained"):
            find_model(model)


def test_an_adapter_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"is a LoRA adapter, not a model.*--lora NAME=.*--adapter"):
        find_model(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="makes a pipe and links")
def test_pipes_and_links_to_nothing_are_refused_by_what_they_are(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelNotFoundError, match="is a pipe or a device; save the model to a file"):
        find_model(tmp_path / "pipe.gguf")
    for name, target in (("gone.gguf", "other.gguf"), ("itself.gguf", "itself.gguf")):
        (tmp_path / name).symlink_to(target)
        reason = f"{name} is a link to {target}, which leads to no file"
        with pytest.raises(ModelNotFoundError, match=reason):
            find_model(str(tmp_path / name))
