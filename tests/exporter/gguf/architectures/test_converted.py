"""Files that llama.cpp's converter wrote of the families' tiny checkpoints compute what transformers does.

``tests/corpora/converted_ggufs/CASE.gguf`` is what ``convert_hf_to_gguf.py`` of llama.cpp (August 2026, as
packaged with llama-cpp-python 0.3.36) makes of ``family_cases.write_case(CASE)``: bfloat16, which holds the
weights exactly; float32 for Falcon-H1, whose weights it multiplies. The vocabulary is ``tiny_gguf``'s.
BitNet's norms had the names of 1bitLLM's models, and its weights were not rounded to three values.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import onnxruntime as ort
import pytest
from engines import CachedDecoder
from exporter_golden import COLUMNS, golden_path, prompt
from fuzzing import CORPORA
from tiny_gguf import rewrite

from carryall.errors import CheckpointError
from carryall.exporter.export import export_package
from carryall.exporter.gguf.architecture import architectures
from carryall.exporter.gguf.file import GgufFile

FILES = sorted((CORPORA / "converted_ggufs").glob("*.gguf"))


@pytest.mark.long
@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_logits_are_those_of_transformers(path: Path, tmp_path: Path) -> None:
    package = export_package(path, tmp_path / "package")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(package.model_path, options, providers=["CPUExecutionProvider"])
    tokens, mask = prompt()
    net = CachedDecoder(lambda feeds: list(session.run(None, feeds)), package.model_path, batch=2)
    with np.load(golden_path(path.stem)) as golden:
        found = np.array(net(tokens, mask))[..., COLUMNS]
        scale = np.abs(golden["prompt_logits"]).max()
        real = mask.astype(bool)
        np.testing.assert_allclose(found[real], golden["prompt_logits"][real], rtol=0, atol=1e-4 * scale)


def test_a_file_without_the_parameters_of_its_activation_is_refused(tmp_path: Path) -> None:
    content = (CORPORA / "converted_ggufs" / "apertus.gguf").read_bytes()
    path = tmp_path / "other.gguf"
    path.write_bytes(content.replace(b"xielu.beta", b"xielu.betb"))
    with pytest.raises(CheckpointError, match=r"'xielu.beta' is no list of a number for each of 2 layers"):
        GgufFile(path)


def test_most_architectures_have_a_file() -> None:
    """Others are in ``tiny_gguf``, or read as one of these."""
    covered = {GgufFile(path).metadata["general.architecture"] for path in FILES}
    written = {
        "llama",
        "smollm3",
        "qwen2",
        "qwen3",
        "qwen3moe",
        "qwen35",
        "lfm2",
        "phi3",
        "gpt-oss",
        "gemma2",
        "gemma3",
    }
    alike = {"qwen2moe", "qwen2vl", "qwen3vl", "qwen3vlmoe", "nemotron_h"}
    assert architectures().keys() - covered - written == alike


def test_a_convolution_of_another_form_is_refused(tmp_path: Path) -> None:
    def twice(tensor: gguf.ReaderTensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        array = np.array(tensor.data)
        return np.concatenate([array, array]) if "ssm_conv1d_k" in tensor.name else array, tensor.tensor_type

    rewrite(CORPORA / "converted_ggufs" / "kimi_linear.gguf", tmp_path / "m.gguf", {}, twice)
    with pytest.raises(
        CheckpointError, match=r"tensor 'blk.0.ssm_conv1d_k.weight' has the shape \[2, 32, 1, 4\]"
    ):
        GgufFile(tmp_path / "m.gguf")
