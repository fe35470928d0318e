"""GGUF files of hybrid models, as llama.cpp's converter orders their tensors, compute what checkpoints do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exporter_golden import golden_path, prompt
from family_cases import CASES, write_case
from tiny_gguf import embedding, write_gguf

from carryall import evaluate
from carryall.errors import CheckpointError
from carryall.exporter.gguf.config import config_of
from carryall.exporter.gguf.file import GgufFile
from carryall.runtime.api.llm import LLM
from carryall.runtime.types.sampling_params import SamplingParams

# The types of matrices whose inputs are whole blocks of 32.
TYPES = dict.fromkeys(("in_proj", "q_proj", "k_proj", "v_proj", "out_proj"), "Q8_0")


@pytest.mark.long
@pytest.mark.parametrize("case", ["qwen3_5_text-tiles", "lfm2"])
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model_type, overrides = CASES[case]
    write_gguf(model_type, tmp_path / "m.gguf", **overrides)
    with LLM(tmp_path / "m.gguf", max_slots=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
        (output,) = llm.generate([prompt()[0][0].tolist()], params)
    with np.load(golden_path(case)) as golden:
        assert output.outputs[0].token_ids == golden["tokens"][0].tolist()


@pytest.mark.long
@pytest.mark.parametrize("case", ["qwen3_5_text-tiles", "lfm2"])
def test_quantized_blocks_lose_little(case: str, tmp_path: Path) -> None:
    model_type, overrides = CASES[case]
    write_gguf(model_type, tmp_path / "m.gguf", types=TYPES, **overrides)
    numbers = np.random.default_rng(3).integers(0, 999, 200)
    checkpoint = write_case(case, tmp_path / "checkpoint")
    text = " ".join(map(str, numbers))
    divergence = evaluate(tmp_path / "m.gguf", text, reference=checkpoint, max_tokens=128).prediction.mean_kl
    assert divergence is not None
    assert divergence < 0.05


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    extra = {"blk.4.nextn.eh_proj.weight": np.zeros((2, 4), np.float32)}
    write_gguf("qwen3_5_text", tmp_path / "m.gguf", extra=extra)
    file = GgufFile(tmp_path / "m.gguf")
    stated = {**file.metadata, "qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    config = config_of(stated, file.tensors)
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 4


@pytest.mark.parametrize("key", ["ssm.inner_size", "ssm.time_step_rank"])
def test_a_missing_size_is_named(key: str, tmp_path: Path) -> None:
    write_gguf("qwen3_5_text", tmp_path / "m.gguf")
    stated = {
        name: value for name, value in GgufFile(tmp_path / "m.gguf").metadata.items() if key not in name
    }
    with pytest.raises(CheckpointError, match="linear_"):
        config_of(stated, embedding(260))
