"""Public reports of weights that were read wrongly: packed words, zero points, tied matrices, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_quantized as tiny
from safetensors.numpy import load_file, save_file
from tiny_gguf import write_gguf
from tiny_models import write_tiny

from carryall import LLM, SamplingParams
from carryall.errors import CheckpointError, WeightWarning
from carryall.exporter.export import export_package

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
PROMPT = [3, 9, 5, 80]


def said(model: Path) -> list[Any]:
    """Return the greedy tokens of a checkpoint or file and their log-probabilities."""
    with LLM(str(model), max_slots=1, context_length=64) as llm:
        (answer,) = llm.generate([PROMPT], GREEDY)[0].outputs
    assert answer.logprobs
    return [
        (token, entry[token].logprob) for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)
    ]


def zeros_of(value: int) -> tiny.Quantize:
    """AWQ's tensors with one zero point for all groups."""

    def quantize(rng: np.random.Generator, outputs: int, inputs: int) -> tiny.Parts:
        levels, zeros, scales = tiny.drawn(rng, outputs, inputs, 4, 32)
        zeros = np.full_like(zeros, value)
        tensors = {
            "qweight": tiny.pack_rows(levels.T, 4, (0, 2, 4, 6, 1, 3, 5, 7)),
            "qzeros": tiny.pack_rows(zeros.T, 4, (0, 2, 4, 6, 1, 3, 5, 7)),
            "scales": scales.T.copy(),
        }
        return tensors, tiny.floats(levels, zeros, scales, tiny.group_index(inputs, 32))

    return quantize


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "settings", "quantize"),
    [
        # A zero point of 0 became 15: one was subtracted before packing.
        ("ModelCloud/GPTQModel#2350", AWQ, zeros_of(0)),
        ("ModelCloud/GPTQModel#2350", AWQ, zeros_of(15)),
        # The file names the first version of the format and holds zero points of the second.
        ("vllm-project/vllm#38966", GPTQ, tiny.gptq(4, 32, v2=True, symmetric=True)),
        ("vllm-project/vllm#38966", GPTQ, tiny.gptq(4, 32, symmetric=True)),
        # The same weights in both formats gave other numbers.
        ("wejoncy/QLLM#26", AWQ, tiny.awq(32)),
        # Zero points had the form of scales, which onnxruntime refuses.
        ("amd/Quark#20", {**GPTQ, "sym": False}, tiny.gptq(4, 32)),
    ],
)
def test_quantized_weights_have_their_values(
    source: str, settings: dict[str, Any], quantize: tiny.Quantize, tmp_path: Path
) -> None:
    checkpoint, twin = tiny.write_quantized(tmp_path, settings, quantize)
    expected = tiny.logits(export_package(twin, tmp_path / "a").path)
    package = export_package(checkpoint, tmp_path / "b")
    limit = 2e-6 * np.abs(expected).max()
    np.testing.assert_allclose(tiny.logits(package.path), expected, rtol=0, atol=limit, err_msg=source)


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize(
    "source",
    # A checkpoint keeps one of two tied matrices under the name of either; the other was left random.
    ["huggingface/transformers#38870", "huggingface/transformers#41038", "huggingface/transformers#34759"],
)
def test_a_tied_matrix_may_have_either_name(source: str, kept: str, tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "a", dtype=np.float32, tie_word_embeddings=True)
    whole = said(folder)
    tensors = load_file(folder / "model.safetensors")
    matrix = tensors.pop("model.embed_tokens.weight")
    tensors.pop("lm_head.weight", None)
    save_file({**tensors, kept: matrix}, folder / "model.safetensors")
    assert said(folder) == whole, source


def test_a_head_that_differs_is_its_own(tmp_path: Path) -> None:
    """huggingface/transformers#48154: a head replaced an embedding because the configuration ties them."""
    folder = write_tiny("llama", tmp_path / "a", dtype=np.float32, tie_word_embeddings=False)
    untied = said(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.warns(WeightWarning, match="the two differ: both are used"):
        assert said(folder) == untied


@pytest.mark.parametrize(
    ("source", "more"),
    [
        # Bytes behind the last tensor.
        ("Comfy-Org/ComfyUI#15602", b"\0" * 8),
    ],
)
def test_a_file_that_is_longer_than_its_header_says_is_damaged(
    source: str, more: bytes, tmp_path: Path
) -> None:
    folder = write_tiny("llama", tmp_path / "a")
    with (folder / "model.safetensors").open("ab") as file:
        file.write(more)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        said(folder)


@pytest.mark.parametrize("alignment", [0, 12])
@pytest.mark.parametrize("source", ["gittensor-ai-lab/sparkinfer#24", "RightNow-AI/picolm#20"])
def test_an_alignment_that_is_none_is_refused(source: str, alignment: int, tmp_path: Path) -> None:
    """Zero was a division by zero; another one moved all tensors."""
    path = tmp_path / "a.gguf"
    write_gguf("llama", path)
    content = bytearray(path.read_bytes())
    # One further key of unsigned integers, counted in the header at byte 16.
    name = b"general.alignment"
    key = len(name).to_bytes(8, "little") + name + (4).to_bytes(4, "little") + alignment.to_bytes(4, "little")
    content[16:24] = (int.from_bytes(content[16:24], "little") + 1).to_bytes(8, "little")
    path.write_bytes(bytes(content[:24]) + key + bytes(content[24:]))
    with pytest.raises(CheckpointError, match="alignment"):
        said(path)
    assert source


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_tensors_lie_where_the_alignment_says(alignment: int, tmp_path: Path) -> None:
    """cisco-ai-defense/defenseclaw#679: 32 was taken for each file."""
    plain = tmp_path / "a.gguf"
    write_gguf("llama", plain)
    other = tmp_path / "b.gguf"
    reader = gguf.GGUFReader(plain)
    writer = gguf.GGUFWriter(other, "llama")
    writer.add_custom_alignment(alignment)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reversed(reader.tensors):  # ollama/ollama#5422: and in another order than their layers
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert said(other) == said(plain)


@pytest.mark.parametrize("head", [True, False])
def test_an_output_matrix_of_a_later_shard_is_the_head(head: bool, tmp_path: Path) -> None:
    """vllm-project/vllm-gguf-plugin#54: a head that another shard held was taken for a tied one."""
    write_gguf("llama", tmp_path / "whole.gguf", tie_word_embeddings=not head)
    whole = said(tmp_path / "whole.gguf")
    write_gguf("llama", tmp_path / "a.gguf", split=4, tie_word_embeddings=not head)
    shards = sorted(tmp_path.glob("a-*.gguf"))
    assert len(shards) > 2
    for shard in (shards[0], shards[-1]):  # FlashML-org/FreeToken#154: any shard opens the model
        assert said(shard) == whole


def test_packed_experts_that_no_graph_reads_are_refused(tmp_path: Path) -> None:
    """huggingface/transformers#47410: packed tensors were left out, and the experts were random."""
    folder = write_tiny("qwen3_moe", tmp_path / "a")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("experts.0.gate_proj.weight"))
    tensors[name.replace(".weight", ".weight_packed")] = np.zeros((4, 4), np.int32)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=name.removesuffix(".weight").replace(".", r"\.")):
        said(folder)
    assert json.loads((folder / "config.json").read_text())
