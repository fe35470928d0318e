"""GGUF files run in place: no package, the same results, errors for files that change or do not fit."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from fuzzing import CORPORA
from programs import program
from tiny_gguf import quantize_matrices, widen_experts, write_gguf

import carryall
from carryall import LLM, SamplingParams
from carryall.cli import carryall as verbs
from carryall.contract import EXPERT_STACKS
from carryall.errors import CheckpointError, GraphError, UsageError
from carryall.exporter.export import export_model, export_package
from carryall.exporter.gguf.file import GgufFile
from carryall.graph_opt.graph.edit import weight
from carryall.graph_opt.lower.products.quantized_experts import QuantizedExpertsPass
from carryall.graph_opt.lower.products.stored_tiles import FORMS
from carryall.graph_opt.pipeline.exported import exported_passes
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
from carryall.providers.host import machine
from carryall.providers.targets.cpu import CpuProvider
from carryall.runtime.models.loading import load_model
from carryall.runtime.models.lowered_graph import lower
from carryall.runtime.models.model_source import GgufModel, resolve_model
from carryall.storage import file_identity, known_contents

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
EXPERTS: dict[str, Any] = {**WIDE, "moe_intermediate_size": 256, "mlp_only_layers": []}
LARGE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 64}  # beyond one megabyte
PROMPT = list(range(3, 30))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logprobs(model: Path, **options: str) -> np.ndarray:
    """The log-probabilities of the prompt's tokens."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    with LLM(model, provider_options={"kv_cache": "float32", **options}) as llm:
        found = llm.generate(PROMPT, params)[0].prompt_logprobs
    assert found is not None
    return np.array([next(iter(each.values())).logprob for each in found[1:] if each])


def assert_near(found: np.ndarray, expected: np.ndarray) -> None:
    """Random weights amplify how activations are rounded; other weights would give any result."""
    assert np.abs(found - expected).mean() < 0.2 * expected.std()
    assert np.corrcoef(found, expected)[0, 1] > 0.95


@pytest.mark.long
@pytest.mark.parametrize("kind", [*FORMS, "F16", "IQ2_XXS", "IQ1_S", "TQ1_0", "TQ2_0"])
def test_a_file_runs_in_place_with_the_results_of_its_package(tmp_path: Path, cache: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types=kind, **WIDE)
    here = logprobs(path)
    assert not (cache / "packages").exists()
    (tiles,) = (cache / "lowered").glob("*/weights.data")
    if kind in FORMS:
        assert tiles.stat().st_size <= 1.1 * path.stat().st_size + (1 << 16)  # tables and alignment
    assert_near(here, logprobs(export_package(path, tmp_path / "package").path))


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q8_0", "F16"])
def test_a_file_is_inspected_in_place(tmp_path: Path, cache: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types={"token_embd": "F16", "": kind}, **WIDE)
    done = CliRunner().invoke(verbs, ["inspect", str(path), "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["quantization"] == (None if kind == "F16" else {"method": "gguf", "types": [kind]})
    stored = sum(math.prod(tensor.shape) for tensor in GgufFile(path).tensors.values())
    assert facts["parameters"] == stored + WIDE["head_dim"] // 2  # the frequencies are the graph's own
    assert facts["files"] == {"m.gguf": path.stat().st_size}
    assert resolve_model(path).summary.quantization == kind
    assert not (cache / "packages").exists()


def test_a_quantized_file_is_refused_before_it_is_exported(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types="Q4_K", **WIDE)
    with pytest.raises(UsageError, match="already quantized"):
        carryall.quantize(path, tmp_path / "out", "int4-fast")
    for method in ("int4-fast", "int4"):
        reason = rf"^{path} is already quantized \(.*Q4_K.*\); leave out the quantization"
        with pytest.raises(UsageError, match=reason):
            carryall.LLM(path, quantize=method)
    assert not (cache / "packages").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_a_file_runs_in_place_with_onnxruntimes_kernels_too(tmp_path: Path, cache: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types=kind, **WIDE)
    here = logprobs(path, kernels="onnxruntime")
    assert not (cache / "packages").exists()
    package = export_package(path, tmp_path / "package").path
    np.testing.assert_allclose(here, logprobs(package, kernels="onnxruntime"), atol=1e-4)


def test_a_mixed_file_merges_only_products_of_one_type(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types={"attn_v": "Q6_K", "ffn_down": "Q6_K", "": "Q4_K"}, **WIDE)
    assert_near(logprobs(path), logprobs(export_package(path, tmp_path / "package").path))


@pytest.mark.long
@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("MXFP4", "MXFP4"), ("IQ4_XS", "Q5_1")])
def test_experts_keep_the_bytes_of_the_file(tmp_path: Path, cache: Path, kinds: tuple[str, str]) -> None:
    path = tmp_path / "m.gguf"
    types = {"experts.down_proj": kinds[1], "": kinds[0]}
    write_gguf("qwen3_moe", path, types=types, **EXPERTS)
    here = logprobs(path)
    (graph,) = (cache / "lowered").glob("*/model.onnx")
    assert "QuantizedExperts" in {
        node.op_type for node in onnx.load(graph, load_external_data=False).graph.node
    }
    tiles = graph.with_name("weights.data").stat().st_size
    assert tiles <= 1.1 * path.stat().st_size + (1 << 16)  # tables and alignment
    assert_near(here, logprobs(export_package(path, tmp_path / "package").path))


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "kinds", "config"),
    [
        ("qwen3_moe", ("Q4_K", "Q6_K"), {}),
        ("qwen3_moe", ("Q4_0", "Q4_1"), {"norm_topk_prob": False}),
        ("qwen3_moe", ("MXFP4", "Q8_0"), {"num_experts": 32, "num_experts_per_tok": 3}),
        ("qwen3_moe", ("IQ4_XS", "Q5_K"), {"num_hidden_layers": 1}),
        ("gpt_oss", ("MXFP4", "MXFP4"), {}),
    ],
)
def test_stacks_of_experts_become_the_program_of_single_experts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    kinds: tuple[str, str],
    config: dict[str, Any],
) -> None:
    path, (entering, leaving) = tmp_path / "m.gguf", kinds
    types = {"experts.down_proj": leaving, "experts": entering, "proj": "Q8_0"}
    write_gguf(family, path, types=types, **EXPERTS, **config)
    provider = get_provider("cpu")
    options = provider.resolve_options(RunnerConfig(max_slots=1, context_length=32))
    assert EXPERT_STACKS in {node.op_type for node in resolve_model(path).load(stored=True).graph}
    stacked = lower(resolve_model(path), provider, options)
    monkeypatch.setattr(CpuProvider, "takes_stored", lambda *_: False)
    single = lower(resolve_model(path), provider, options)
    assert any(node.op_type == "QuantizedExperts" for node in stacked.graph)
    assert program(stacked) == program(single)


@pytest.mark.long
@pytest.mark.parametrize("kinds", [("Q4_0", "Q8_0"), ("MXFP4", "Q5_1")])
@pytest.mark.parametrize(
    "case",
    [
        *("deepseek_v2-groups-yarn", "deepseek_v3", "ernie4_5_moe", "gemma4_text-experts-one-projection"),
        *("glm4_moe", "glm4_moe_lite", "granitemoe", "granitemoehybrid", "lfm2_moe", "nemotron_h", "olmoe"),
        *("qwen3_5_moe_text", "qwen3_next"),
    ],
)
def test_stacks_of_any_router_become_the_program_of_single_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, kinds: tuple[str, str]
) -> None:
    path = tmp_path / "m.gguf"
    widen_experts(CORPORA / "converted_ggufs" / f"{case}.gguf", path, *kinds, times=4)
    provider = get_provider("cpu")
    options = provider.resolve_options(RunnerConfig(max_slots=1, context_length=32))
    graph = resolve_model(path).load(stored=True).graph
    layers = [node.op_type for node in graph].count(EXPERT_STACKS)
    assert layers > 0
    assert not [name for name in graph.initializers if re.search(r"experts\.\d", name)]
    stacked = lower(resolve_model(path), provider, options)
    monkeypatch.setattr(CpuProvider, "takes_stored", lambda *_: False)
    single = lower(resolve_model(path), provider, options)
    assert [node.op_type for node in stacked.graph].count("QuantizedExperts") == layers
    assert program(stacked) == program(single)


FAMILIES = sorted(path.stem for path in (CORPORA / "converted_ggufs").glob("*.gguf"))


@pytest.mark.parametrize(
    "case", [case if case == "olmo2" else pytest.param(case, marks=pytest.mark.long) for case in FAMILIES]
)
def test_weights_that_keep_blocks_become_the_program_of_their_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    path = tmp_path / "m.gguf"
    quantize_matrices(CORPORA / "converted_ggufs" / f"{case}.gguf", path, "Q4_1", "Q8_0", "Q8_0")
    provider = get_provider("cpu")
    options = provider.resolve_options(RunnerConfig(max_slots=1, context_length=32))
    kept = lower(resolve_model(path), provider, options)
    monkeypatch.setattr(CpuProvider, "takes_stored", lambda *_: False)
    levels = lower(resolve_model(path), provider, options)
    assert "QuantizedLinear" in {node.op_type for node in kept.graph}
    assert program(kept) == program(levels)


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "IQ2_S"])
def test_a_graph_of_kept_blocks_dequantizes_no_product(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types=kind, **WIDE)
    graph = resolve_model(path).load(stored=True).graph
    products = [node.inputs[1] for node in graph if node.op_type == "MatMul" and "proj" in str(node.name)]
    floats = {value.name: tensor for value in products if (tensor := weight(value)) is not None and value}
    assert len(floats) == (len(products) if kind in FORMS else 0)
    stored = GgufFile(path).tensors
    for name, tensor in floats.items():
        np.testing.assert_array_equal(tensor.numpy(), stored[str(name)].read(np.transpose))


def test_stacks_whose_blocks_no_kernel_reads_are_single_experts(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("qwen3_moe", path, types={"experts": "IQ2_S"}, **EXPERTS)
    model = resolve_model(path)
    assert isinstance(model, GgufModel)
    assert model.opened().stacks
    assert not model.has_stored
    assert EXPERT_STACKS not in {node.op_type for node in model.load(stored=True).graph}


def test_a_target_without_kernels_for_stacks_refuses_them(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("qwen3_moe", path, types={"experts": "Q4_K"}, **EXPERTS)
    with pytest.raises(GraphError, match="stacks of experts, whose blocks the target does not take"):
        run(resolve_model(path).load(stored=True), [QuantizedExpertsPass()])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "smollm3"])
def test_the_exporters_graph_is_canonical(tmp_path: Path, family: str) -> None:
    """Loading a file in place runs only ``exported_passes``."""
    write_gguf(family, tmp_path / "m.gguf")
    file = GgufFile(tmp_path / "m.gguf")
    _, report = run(export_model(tmp_path, file.config, file.tensors), portable_passes())
    named = {getattr(each, "name", type(each).__name__).removesuffix("Pass") for each in exported_passes()}
    assert {each.name for each in report.passes if each.fired} <= named


def test_the_second_start_reads_nothing_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types="Q4_K", **WIDE)
    first = logprobs(path)
    monkeypatch.setattr(GgufFile, "__init__", lambda *_: pytest.fail("the header was read again"))
    np.testing.assert_array_equal(logprobs(path), first)


def test_another_file_of_the_same_name_is_prepared_again(tmp_path: Path) -> None:
    path, other = tmp_path / "m.gguf", tmp_path / "n.gguf"
    write_gguf("llama", path, types="Q4_K", **WIDE)
    first = logprobs(path)
    write_gguf("llama", other, types="Q6_K", **WIDE)
    os.replace(other, path)
    assert np.abs(logprobs(path) - first).max() > 1e-3


def test_a_file_is_prepared_once_under_any_name(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, renamed, linked = (tmp_path / f"{name}.gguf" for name in "mno")
    write_gguf("llama", path, types="Q4_K", **WIDE)
    first = logprobs(path)
    monkeypatch.setattr(GgufFile, "__init__", lambda *_: pytest.fail("the header was read again"))
    path.rename(renamed)
    os.link(renamed, linked)
    for name in (renamed, linked):
        np.testing.assert_array_equal(logprobs(name), first)
    assert len(list((cache / "lowered").glob("[!.]*"))) == 1


def unsampled_byte(path: Path) -> int:
    """Return the place of a byte that no sample of the identity holds."""
    (tensor,) = [each for each in gguf.GGUFReader(path).tensors if each.name == "blk.1.ffn_down.weight"]
    return int(tensor.data_offset) + 5000


@pytest.mark.long
def test_copies_and_touched_files_are_prepared_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, copied = tmp_path / "m.gguf", tmp_path / "copies" / "n.gguf"
    write_gguf("llama", path, types="Q4_K", **LARGE)
    first = logprobs(path)
    copied.parent.mkdir()
    shutil.copyfile(path, copied)
    os.utime(path, (1, 1))
    opened, summed = GgufFile.__init__, 0
    monkeypatch.setattr(GgufFile, "__init__", lambda *_: pytest.fail("the header was read again"))

    def sums(name: Path) -> str:
        nonlocal summed
        summed += 1
        return original(name)

    original = known_contents._sums
    monkeypatch.setattr(known_contents, "_sums", sums)
    for name in (path, copied, path, copied):
        np.testing.assert_array_equal(logprobs(name), first)
    assert summed == 2  # each once
    assert len(list((cache / "lowered").glob("[!.]*"))) == 1
    monkeypatch.setattr(GgufFile, "__init__", opened)
    shutil.rmtree(cache / "lowered")
    np.testing.assert_array_equal(logprobs(copied), first)  # prepared from the copy


@pytest.mark.long
@pytest.mark.parametrize("in_place", [True, False])
def test_a_change_between_the_samples_is_seen(tmp_path: Path, in_place: bool) -> None:
    path, other = tmp_path / "m.gguf", tmp_path / "n.gguf"
    write_gguf("llama", path, types="Q4_K", **LARGE)
    before, first = file_identity.identity_of([path]), logprobs(path)
    place = path if in_place else Path(shutil.copyfile(path, other))
    with place.open("r+b") as file:
        file.seek(unsampled_byte(path))
        file.write(b"\x5a" * 64)
    after = file_identity.identity_of([place])
    assert after.likeness == before.likeness
    assert after.own != before.own
    assert np.abs(logprobs(place) - first).max() > 1e-3
    if not in_place:
        np.testing.assert_array_equal(logprobs(path), first)


def test_a_truncated_file_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types="Q4_K", **WIDE)
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(CheckpointError, match="ends at byte"):
        load_model(path)
    assert not list(cache.rglob("*.onnx*"))


@pytest.mark.parametrize("change", ["truncate", "replace", "write"])
def test_a_file_that_changes_while_it_is_read_is_an_error(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Its parts are read by calls, so that no signal ends the process."""
    path, calls = tmp_path / "m.gguf", 0
    write_gguf("llama", path, types="Q4_K", **WIDE)
    shutil.copy(path, tmp_path / "n.gguf")
    resolve_model(path)
    original = file_identity.OpenFile.read

    def read(self: file_identity.OpenFile, begin: int, count: int) -> np.ndarray:
        nonlocal calls
        calls += begin > 0
        if calls == 3:  # of weights: those of the identity and the header begin at 0
            if change == "truncate":
                os.truncate(path, 100)
            elif change == "replace":
                os.replace(tmp_path / "n.gguf", path)
            else:
                with path.open("r+b") as file:
                    file.write(b"GGUF")
        return original(self, begin, count)

    monkeypatch.setattr(file_identity.OpenFile, "read", read)
    with pytest.raises(CheckpointError, match=r"replaced or changed while it was read|ends at byte"):
        load_model(path)
    assert calls >= 3
    assert not list(cache.rglob("*.onnx*"))


def test_a_model_larger_than_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types="Q4_K", **WIDE)
    resolved = resolve_model(path)
    assert isinstance(resolved, GgufModel)
    _ = resolved.facts
    monkeypatch.setattr(machine, "memory", lambda: (path.stat().st_size - 1, 10**12))
    with pytest.raises(UsageError, match=r"of weights, and this process may use .* take a smaller model"):
        load_model(path)


def test_a_disk_without_room_is_refused_before_it_is_written(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types="Q4_K", **WIDE)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(UsageError, match=r"preparing .* writes .* which has 1.0 kB left"):
        load_model(path)
    assert not (cache / "lowered").exists()


@pytest.mark.long
def test_processes_that_prepare_at_once_answer_alike(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types="Q4_K", **WIDE)
    code = (
        "import sys; from carryall import LLM, SamplingParams\n"
        f"with LLM({str(path)!r}) as llm: print(llm.generate([5, 6, 7], SamplingParams(max_tokens=8, "
        "temperature=0))[0].outputs[0].token_ids)"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [error for _, error in outputs] == [""] * 3
    assert len({out for out, _ in outputs}) == 1
    assert len(list((cache / "lowered").glob("[!.]*"))) == 1


def test_a_file_is_evaluated_as_stored_too(tmp_path: Path) -> None:
    """That needs an ONNX file of the portable graph, so this makes a package."""
    path = tmp_path / "m.gguf"
    write_gguf("llama", path, types="Q4_K", **WIDE)
    report = carryall.evaluate(path, text="abba baab " * 20, max_tokens=40, as_stored=True)
    assert report.prediction.stored is not None
    assert report.prediction.stored.perplexity > 1


def test_a_missing_tensor_is_one_of_the_file(tmp_path: Path, cache: Path) -> None:
    write_gguf("qwen3", tmp_path / "m.gguf")
    changed = (
        (tmp_path / "m.gguf").read_bytes().replace(b"blk.1.attn_k_norm.weight", b"blk.1.attn_k_morm.weight")
    )
    (tmp_path / "m.gguf").write_bytes(changed)
    lost = f"{tmp_path / 'm.gguf'} holds no tensor 'model.layers.1.self_attn.k_norm.weight'"
    with pytest.raises(CheckpointError, match=re.escape(lost)):
        load_model(tmp_path / "m.gguf", max_slots=2)
