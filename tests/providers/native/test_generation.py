"""Generation with carryall's kernels: the demo model, the same tokens for any batch, and one graph."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.errors import UsageError
from carryall.exporter.export import export_package
from carryall.graph_opt.graph.edit import nodes_of
from carryall.graph_opt.lower.pipelines.standard import DecomposeAttentionPass
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.quantize.recipe import QuantizationRecipe
from carryall.providers.base import Row
from carryall.providers.runners.explicit_runner import ExplicitRunner
from carryall.providers.runners.paged_runner import PagedRunner
from carryall.runtime.models.loading import load_model
from carryall.runtime.tasks.quantize import quantize

OWN = {"kernels": "carryall"}
PROMPT = np.arange(5, 45)


@pytest.fixture(autouse=True)
def _library(kernels_of_this_machine: Path) -> None:
    """Every test of this module needs the library."""


@pytest.mark.long
def test_logits_are_near_those_of_onnxruntimes_kernels() -> None:
    found = []
    for options in (OWN, {"kernels": "onnxruntime"}):
        loaded = load_model("demo", quantize="int4-fast", max_slots=2, provider_options=options)
        found.append(loaded.runner.forward([Row(0, PROMPT, 0, num_logits=8)])[0].copy())
        loaded.close()
    own, other = found
    assert 0 < np.linalg.norm(own - other) < 0.02 * np.linalg.norm(other)


def test_decoding_beside_other_rows_changes_no_bit() -> None:
    """Each row attends to its own slot, and products do not depend on the rows beside it."""
    loaded = load_model("demo", quantize="int4-fast", max_slots=12, provider_options=OWN)
    runner = loaded.runner
    for slot in range(12):
        runner.forward([Row(slot, PROMPT[: 20 + slot], 0)])
    together = [
        logits.copy() for logits in runner.forward([Row(slot, PROMPT[:1], 20 + slot) for slot in range(12)])
    ]
    for slot in range(12):
        alone = runner.forward([Row(slot, PROMPT[:1], 20 + slot)])[0]
        np.testing.assert_array_equal(alone, together[slot])
    loaded.close()


@pytest.mark.long
def test_one_graph_holds_every_product(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path))
    load_model("demo", quantize="int4-fast", max_slots=2, provider_options=OWN).close()
    (path,) = (tmp_path / "lowered").glob("*/*.onnx")
    operators = Counter(node.op_type for node in ir.load(path).graph)
    assert operators["QuantizedLinear"] > 0
    assert operators["QuantizedRows"] == 1
    assert not {"MatMulNBits", "GatherBlockQuantized", "MatMul"} & set(operators)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_long_context_has_the_angles_of_its_tokens_and_no_table(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    checkpoint = write_tiny(family, tmp_path / family, head_dim=32, max_position_embeddings=1 << 18)
    found, tables = [], []
    for context in (1 << 18, 1 << 10):  # 16 MB of each table, and 64 KB
        loaded = load_model(checkpoint, max_slots=4, context_length=context, provider_options=OWN)
        loaded.runner.forward([Row(slot, PROMPT[slot:], 0) for slot in range(3)])
        steps = [Row(slot, PROMPT[:1], len(PROMPT) - slot) for slot in range(3)]
        together = [logits.copy() for logits in loaded.runner.forward(steps)]
        for step, logits in zip(steps, together, strict=True):
            np.testing.assert_array_equal(loaded.runner.forward([step])[0], logits)
        found.append(together)
        tables.append(sum("table" in name for name in ir.load(loaded.graphs[0]).graph.initializers))
        loaded.close()
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-5)
    assert tables[0] == 0 < tables[1]


def test_alibi_runs_in_the_kernel_and_with_explicit_kv_in_onnxruntimes(tmp_path: Path) -> None:
    checkpoint, found = write_tiny("bloom", tmp_path / "bloom"), []
    for kernels in ("carryall", "onnxruntime"):
        loaded = load_model(checkpoint, max_slots=2, provider_options={"kernels": kernels})
        assert isinstance(loaded.runner, ExplicitRunner) == (kernels == "onnxruntime")
        loaded.runner.forward([Row(1, PROMPT[:7], 0)])
        found.append(loaded.runner.forward([Row(0, PROMPT, 0, num_logits=8)])[0].copy())
        loaded.close()
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantized", [False, True], ids=["float", "int8"])
def test_a_graph_without_attention_operators_has_kv_in_blocks_too(tmp_path: Path, quantized: bool) -> None:
    """As traces have none. What is decided by the graph must be decided by its canonical form."""
    package = export_package(write_tiny("llama", tmp_path / "tiny"), tmp_path / "package")
    folder = tmp_path / "folder"
    model = run(package.load(), [DecomposeAttentionPass()])[0]
    assert not list(nodes_of(model.graph, "Attention"))
    folder.mkdir()
    ir.save(model, folder / "model.onnx", external_data="model.data")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(package.path / name, folder)
    sources = [package.path, folder]
    if quantized:
        recipe = QuantizationRecipe(method="int8-fast")
        sources = [quantize(source, tmp_path / f"{source.name}.int8", recipe).path for source in sources]
    found = []
    for source in sources:
        loaded = load_model(source, max_slots=2)
        assert isinstance(loaded.runner, PagedRunner)
        found.append(loaded.runner.forward([Row(0, PROMPT, 0, num_logits=8)])[0].copy())
        loaded.close()
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_a_bfloat16_cache_takes_half_the_memory_and_is_near_float32() -> None:
    found, sizes = {}, {}
    for kind in ("float32", "bfloat16", "int8"):
        options = {**OWN, "kv_memory": "paged", "kv_cache": kind}
        # Float weights: activations rounded to int8 turn any difference into 1 %.
        loaded = load_model("demo", max_slots=2, provider_options=options)
        found[kind] = loaded.runner.forward([Row(0, PROMPT, 0, num_logits=8)])[0].copy()
        sizes[kind] = loaded.runner.info.kv_bytes_per_token
        loaded.close()
    assert sizes["float32"] == 2 * sizes["bfloat16"]
    assert sizes["bfloat16"] > sizes["int8"]
    error = {kind: np.linalg.norm(logits - found["float32"]) for kind, logits in found.items()}
    assert 0 < error["bfloat16"] < 0.01 * np.linalg.norm(found["float32"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("quantized", "kind"), [(None, "float32"), ("int8-fast", "bfloat16"), ("int4-fast", "int8")]
)
def test_the_type_of_the_cache_follows_the_bits_of_the_weights(quantized: str | None, kind: str) -> None:
    sizes = []
    for asked in ("auto", kind):
        options = {**OWN, "kv_memory": "paged", "kv_cache": asked}
        loaded = load_model("demo", quantize=quantized, max_slots=2, provider_options=options)
        sizes.append(loaded.runner.info.kv_bytes_per_token)
        loaded.close()
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("other", [{"kv_memory": "explicit"}, {"kernels": "onnxruntime"}])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bfloat16", "needs carryall's CPU kernels and kv_memory=paged"),
        ("int8", "explicit KV cannot be int8"),
    ],
)
def test_explicit_kv_is_float(kind: str, message: str, other: dict[str, str]) -> None:
    options = {**OWN, "kv_cache": kind, **other}
    with pytest.raises(UsageError, match=message):
        load_model("demo", quantize="int4-fast", provider_options=options)
