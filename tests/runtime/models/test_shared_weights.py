"""Graphs of one model for several context lengths have one file of weights in common."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from family_cases import CASES
from tiny_gguf import write_gguf
from tiny_models import write_tiny

from carryall import LLM, SamplingParams
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
from carryall.runtime.models.lowered_graph import lower
from carryall.runtime.models.lowering import lowered_model, with_context
from carryall.runtime.models.model_source import SourceModel, resolve_model
from carryall.storage import hashes, manifest
from carryall.storage.cache_entries import cache_entries

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
PROMPT = [list(range(3, 20))]
WEIGHTS = "weights.data"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_gguf("llama", tmp_path / "m.gguf", types="Q4_K", **SIZES)
    return tmp_path / "m.gguf"


def tokens(model: Path, context_length: int) -> Any:
    with LLM(str(model), context_length=context_length) as llm:
        (answer,) = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0))
    return answer.outputs[0].token_ids


def lowered(model: Path, context_length: int) -> Path:
    """Return the folder of a graph."""
    source, provider = resolve_model(str(model)), get_provider("cpu")
    config = with_context(RunnerConfig(max_slots=1, context_length=context_length), source)
    return lowered_model(source, provider, provider.resolve_options(config)).parent


def test_weights_are_written_once(model: Path, cache: Path) -> None:
    first = tokens(model, 32)
    assert tokens(model, 48) == first == tokens(model, 32)
    one, other = ((cache / "lowered").glob(f"*.{length}/{WEIGHTS}") for length in (32, 48))
    (left,), (right,) = one, other
    assert left.samefile(right)
    graphs = [ir.load(path.with_name("model.onnx")) for path in (left, right)]
    names = [{str(t.location) for t in stored(graph)} for graph in graphs]
    assert names == [{WEIGHTS, "model.onnx.data"}] * 2  # the tables of angles differ
    disk = {file.stat().st_ino: file.stat().st_size for file in cache.rglob("*") if file.is_file()}
    entries = cache_entries()
    listed = sum(entry.size for entry in entries)
    hashes_bytes = sum(file.stat().st_size for file in (cache / "hashes").iterdir())
    assert sum(disk.values()) - hashes_bytes - len(entries) <= listed <= sum(disk.values())


def stored(graph: ir.Model) -> list[ir.ExternalTensor]:
    values = (value.const_value for value in graph.graph.initializers.values())
    return [tensor for tensor in values if isinstance(tensor, ir.ExternalTensor)]


def test_one_context_goes_and_the_other_stays(model: Path) -> None:
    first, other = lowered(model, 32), lowered(model, 48)
    answer = tokens(model, 48)
    shutil.rmtree(first)
    assert tokens(model, 48) == answer
    assert lowered(model, 32).joinpath(WEIGHTS).samefile(other / WEIGHTS)


def test_other_weights_and_other_options_share_nothing(model: Path, tmp_path: Path) -> None:
    write_gguf("llama", tmp_path / "n.gguf", types="Q4_K", **SIZES, seed=9)
    own = lowered(model, 32) / WEIGHTS
    assert not own.samefile(lowered(tmp_path / "n.gguf", 48) / WEIGHTS)
    source, provider = resolve_model(str(model)), get_provider("cpu")
    config = with_context(RunnerConfig(context_length=48, options={"kernels": "onnxruntime"}), source)
    path = lowered_model(source, provider, provider.resolve_options(config))
    assert not own.samefile(path.with_name(WEIGHTS))


def test_a_file_system_without_links_keeps_copies(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = tokens(model, 32)
    monkeypatch.setattr(os, "link", refuse)
    assert tokens(model, 48) == answer
    left, right = lowered(model, 32) / WEIGHTS, lowered(model, 48) / WEIGHTS
    assert not left.samefile(right)
    assert left.read_bytes() == right.read_bytes()


def refuse(*_: object) -> None:
    raise PermissionError("no links")


def test_a_damaged_file_is_not_taken(model: Path) -> None:
    first = lowered(model, 32)
    answer, content = tokens(model, 32), (first / WEIGHTS).read_bytes()
    with (first / WEIGHTS).open("r+b") as file:
        file.seek(len(content) // 2)
        file.write(bytes(200))
    assert tokens(model, 48) == answer
    assert (lowered(model, 48) / WEIGHTS).read_bytes() == content
    assert lowered(model, 32).joinpath(WEIGHTS).samefile(lowered(model, 48) / WEIGHTS)


def test_a_linked_file_is_not_read_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hashes, manifest):
        monkeypatch.setattr(module, "LARGE_BYTES", 1000)
    lowered(model, 32)
    original, read = hashes._hash, []

    def hashed(path: Path, *rest: Any) -> Any:
        read.append(path.name)
        return original(path, *rest)

    monkeypatch.setattr(hashes, "_hash", hashed)
    for length in (48, 32, 48):
        monkeypatch.setattr(hashes, "_in_process", {})  # as in another process
        lowered(model, length)
    assert WEIGHTS not in read


def test_what_is_linked_needs_no_room(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered(model, 32)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: (1, 1, 0))
    lowered(model, 48)


FAMILIES = (
    *("llama-dynamic", "llama-yarn", "llama-llama3", "phi3", "phi3-short"),  # other angles for other contexts
    *("gemma3_text", "gpt2", "bloom"),
)


@pytest.mark.long
@pytest.mark.parametrize("target", ["cpu", "openvino"])
@pytest.mark.parametrize("case", [name for name in CASES if name in FAMILIES])
def test_tensors_of_files_do_not_depend_on_the_context(tmp_path: Path, case: str, target: str) -> None:
    family, changes = CASES[case]
    source = resolve_model(str(write_tiny(family, tmp_path / "model", **changes)))
    longest = source.context.longest if source.context else 64
    short, long = (of_files(source, target, length) for length in (longest // 2, longest))
    assert short.keys() == long.keys()
    for name, tensor in short.items():
        np.testing.assert_array_equal(tensor.numpy(), long[name].numpy())


def of_files(source: SourceModel, target: str, context_length: int) -> dict[str, ir.TensorProtocol]:
    provider = get_provider(target)
    config = with_context(RunnerConfig(context_length=context_length), source)
    values = lower(source, provider, provider.resolve_options(config)).graph.initializers.values()
    tensors = {str(value.name): value.const_value for value in values}
    return {name: t for name, t in tensors.items() if isinstance(t, ir.LazyTensor | ir.ExternalTensor)}
