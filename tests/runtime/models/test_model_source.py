"""The forms of MODEL, and the folders they resolve to."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import onnx_ir as ir
import pytest
from tiny_gguf import write_gguf
from tiny_models import write_tiny

import carryall
from carryall.errors import CheckpointError, GraphError, ModelNotFoundError, PackageError, UsageError
from carryall.exporter.demo import demo_path
from carryall.exporter.export import export_package
from carryall.exporter.package import Package
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
from carryall.runtime.models import find
from carryall.runtime.models.context import ContextLengths
from carryall.runtime.models.lowering import lowered_model, with_context
from carryall.runtime.models.model_source import SourceModel, locate_model, resolve_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny("llama", tmp_path / "tiny", hidden_size=128, intermediate_size=128)


@pytest.fixture
def package(checkpoint: Path, tmp_path: Path) -> Path:
    return export_package(checkpoint, tmp_path / "package").path


def test_demo_names() -> None:
    assert locate_model("demo") == demo_path("pycoder")
    assert locate_model("draft") == demo_path("draft")
    assert locate_model("reader") == demo_path("reader")


def test_a_folder_does_not_shadow_the_demo(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    checkpoint.rename("demo")
    with pytest.warns(UserWarning, match=r"'demo' is the embedded model; write \./demo for the folder"):
        assert locate_model("demo") == demo_path("pycoder")
    assert locate_model("./demo") == locate_model(Path("demo")) == Path("demo")


def test_a_package_is_taken_as_it_is(package: Path, own_cache: Path) -> None:
    files = resolve_model(package)
    assert (files.folder, files.model_path) == (package, package / "model.onnx")
    assert (files.context, files.lowered) == (ContextLengths(128, 128), False)
    assert not (own_cache / "packages").exists()


def test_a_checkpoint_is_exported_once_with_progress(checkpoint: Path, own_cache: Path) -> None:
    told: list[tuple[int, int]] = []
    files = resolve_model(checkpoint, progress=lambda done, total, name: told.append((done, total)))
    assert (files.folder, told) == (checkpoint, [])  # it runs in place
    exported = files.portable_file()
    assert told[-1][0] == told[-1][1] > 0
    assert own_cache in exported.parents
    told.clear()
    assert resolve_model(checkpoint, progress=lambda *_: told.append((0, 0))).portable_file() == exported
    assert told == []


def test_a_changed_checkpoint_is_exported_again(checkpoint: Path) -> None:
    before = resolve_model(checkpoint)
    exported, key = before.portable_file(), before.content_key
    write_tiny("llama", checkpoint, seed=1, hidden_size=128, intermediate_size=128)
    after = resolve_model(checkpoint)
    assert after.portable_file() != exported
    assert after.content_key != key


def test_a_checkpoint_and_a_package_quantize_to_the_same_weights(checkpoint: Path, package: Path) -> None:
    one, other = resolve_model(checkpoint, quantize="int4-fast"), resolve_model(package, quantize="int4-fast")
    names = {value.const_value.dtype for value in one.load().graph.initializers.values() if value.const_value}
    assert ir.DataType.UINT4 in names
    data = [files.portable_file().with_name("model.onnx.data").read_bytes() for files in (one, other)]
    assert data[0] == data[1]
    record = Package.open(other.folder).record
    assert record.quantization is not None
    assert record.quantization["method"] == "int4-fast"
    assert record.passes == ("WeightOnlyQuantization",)


def test_wrong_quantization_is_refused(checkpoint: Path, package: Path) -> None:
    with pytest.raises(UsageError, match="method must be one of int4"):
        resolve_model(checkpoint, quantize="int3")
    quantized = resolve_model(package, quantize="int4-fast").folder
    with pytest.raises(UsageError, match="is already quantized"):
        resolve_model(quantized, quantize="int4-fast")
    with pytest.raises(UsageError, match="is an ONNX file"):
        resolve_model(package / "model.onnx", quantize="int4-fast")


def test_an_onnx_file_beside_its_tokenizer(package: Path) -> None:
    files = resolve_model(package / "model.onnx")
    assert files.folder == package
    assert files.context == ContextLengths(128, 128)


def test_without_a_configuration_the_graph_or_the_user_states_the_context_length(
    package: Path, tmp_path: Path
) -> None:
    shutil.copytree(package, tmp_path / "bare", ignore=shutil.ignore_patterns("*.json"))
    path = tmp_path / "bare" / "model.onnx"
    assert resolve_model(path).context == ContextLengths(128, 128)  # of the graph's metadata
    model = ir.load(path)
    model.metadata_props.clear()
    ir.save(model, path)
    files = resolve_model(path)
    assert files.context is None
    with pytest.raises(UsageError, match="states its context length; add --context-length"):
        with_context(RunnerConfig(), files)
    assert with_context(RunnerConfig(context_length=99), files).context_length == 99


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("nothing", ModelNotFoundError, "no model 'nothing'; give a package"),
        ("empty", ModelNotFoundError, "it has no config.json"),
        ("notes.txt", ModelNotFoundError, "is not a model"),
        ("model.gguf", CheckpointError, "model.gguf is not a GGUF file"),
        ("./nope", ModelNotFoundError, r"there is no file or folder \./nope"),
        ("../nope", ModelNotFoundError, r"there is no file or folder \.\./nope"),
        ("~/nope", ModelNotFoundError, "there is no file or folder ~/nope"),
        ("/nope", ModelNotFoundError, "there is no file or folder /nope"),
        ("a/b/nope", ModelNotFoundError, "there is no file or folder a/b/nope"),
        ("nope/", ModelNotFoundError, "there is no file or folder nope/"),
        ("a\\nope", ModelNotFoundError, "there is no file or folder a"),
    ],
)
def test_sources_that_are_not_models_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[Exception], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    for file in ("notes.txt", "model.gguf"):
        Path(file).write_text("x")
    with pytest.raises(error, match=words):
        resolve_model(name)


def test_a_gguf_file_is_a_package_only_where_one_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types="Q8_0", hidden_size=64, intermediate_size=96)
    source = resolve_model(path)
    assert source.package is None
    assert source.config["model_type"] == "llama"
    package = Package.open(locate_model(path))
    assert package.record.quantization == {"method": "gguf", "types": ["Q8_0"]}
    assert resolve_model(path).folder == source.folder != package.path
    assert source.portable_file() == package.model_path
    with pytest.raises(UsageError, match="is already quantized"):
        resolve_model(path, quantize="int4-fast")


def test_a_float_gguf_file_may_be_quantized(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types="F16", hidden_size=64, intermediate_size=96)
    record = resolve_model(path, quantize="int8-fast").package
    assert record is not None
    assert (record.record.quantization or {})["method"] == "int8-fast"


def test_a_hub_id_is_fetched(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(hub_id: str, memory: int) -> Path:
        assert memory > 0
        asked.append(hub_id)
        return checkpoint

    monkeypatch.setattr(find, "download", download)
    assert resolve_model("org/name@v1").name == "org/name@v1"
    assert asked == ["org/name@v1"]


def test_a_corrupt_package_is_a_clear_error(package: Path) -> None:
    (package / "model.onnx.data").write_bytes(b"short")
    with pytest.raises(PackageError, match="is damaged: it has 5 bytes instead of"):
        resolve_model(package)


def test_a_corrupt_onnx_file_is_a_clear_error(package: Path) -> None:
    (package / "model.onnx").write_bytes(b"\x08\n broken")
    with pytest.raises(GraphError, match="cannot be read as ONNX"):
        _ = resolve_model(package / "model.onnx").lowered


def lower(files: SourceModel, max_slots: int = 4, context_length: int | None = None) -> Path:
    provider = get_provider("cpu")
    config = with_context(RunnerConfig(max_slots=max_slots, context_length=context_length), files)
    return lowered_model(files, provider, config)


def test_lowering_is_cached_by_model_and_context(package: Path, own_cache: Path) -> None:
    files = resolve_model(package)
    first = lower(files)
    assert any(value.name == "seqlens_k" for value in ir.load(first).graph.inputs)
    assert lower(files) == first
    assert lower(files, max_slots=2) == first
    assert lower(files, context_length=64) != first
    assert len(list((own_cache / "lowered").iterdir())) == 2


def test_a_damaged_lowered_graph_is_made_again(package: Path) -> None:
    files = resolve_model(package)
    path = lower(files)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    assert lower(files).read_bytes() == whole


def test_a_graph_that_is_lowered_already_is_taken_as_it_is(package: Path, tmp_path: Path) -> None:
    lowered = lower(resolve_model(package))
    folder = tmp_path / "lowered"
    shutil.copytree(lowered.parent, folder)
    shutil.copy(package / "config.json", folder)
    files = resolve_model(folder / "model.onnx")
    assert files.lowered
    assert lower(files) == folder / "model.onnx"


def test_the_null_provider_needs_no_lowering(package: Path) -> None:
    files = resolve_model(package)
    config = with_context(RunnerConfig(), files)
    assert lowered_model(files, get_provider("null"), config) == package / "model.onnx"


def test_context_length_is_the_model_s_default_or_within_its_limit(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    files = resolve_model(checkpoint)
    assert with_context(RunnerConfig(), files).context_length == config["max_position_embeddings"]
    for wrong in (129, -1):
        with pytest.raises(UsageError, match=rf"context_length {wrong} is not in \[1, 128\]"):
            with_context(RunnerConfig(context_length=wrong), files)


@pytest.mark.parametrize("place", ["nothing", "pipe", "folder"])
def test_weights_that_are_no_file_are_refused_though_the_graph_is_known(place: str, package: Path) -> None:
    model, weights = package / "model.onnx", package / "model.onnx.data"
    assert resolve_model(model).facts.sizes is not None
    weights.unlink()
    if place == "pipe":  # reading it would block
        os.mkfifo(weights)
    elif place == "folder":
        weights.mkdir()
    with pytest.raises(GraphError, match=r"model\.onnx\.data"):
        _ = resolve_model(model).facts


def test_facts_belong_to_the_content_of_graph_and_weights(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, weights = package / "model.onnx", package / "model.onnx.data"
    before = resolve_model(model).facts
    graph = SourceModel.graph
    monkeypatch.setattr(SourceModel, "graph", property(lambda _: pytest.fail("the graph was read")))
    assert resolve_model(model).facts == before
    monkeypatch.setattr(SourceModel, "graph", graph)
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(GraphError, match=str(weights.name)):
        _ = resolve_model(model).facts


@pytest.mark.long
def test_a_model_that_is_lowered_for_the_cpu_runs_there(tmp_path: Path) -> None:
    """It has slots, and operators of onnxruntime, which others run too."""
    quantized, lowered = str(tmp_path / "int4"), str(tmp_path / "cpu")
    carryall.quantize("demo", quantized, "int4-fast")
    carryall.optimize(quantized, lowered, target="cpu")
    with carryall.LLM(lowered, provider_options={"kernels": "onnxruntime"}) as llm:
        (found,) = llm.generate(["import os"], carryall.SamplingParams(max_tokens=4, temperature=0))
    assert len(found.outputs[0].token_ids) == 4


def test_a_model_in_short(tmp_path: Path) -> None:
    plain = carryall.export("demo", tmp_path / "plain")
    small = carryall.export("demo", tmp_path / "small", quantize="int4-fast")
    for report, level in ((plain, "F32"), (small, "int4-fast")):
        summary = resolve_model(report.path).summary
        assert (summary.family, summary.parameters, summary.quantization) == (
            "llama", report.parameters, level,
        )  # fmt: skip
        assert 0 < summary.bytes <= report.bytes
        assert len(summary.digest) >= 32
    assert resolve_model(plain.path).summary.digest != resolve_model(small.path).summary.digest
