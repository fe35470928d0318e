"""Mixtures of experts on the way from the exporter to tokens: lowered, and with int4 weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exporter_golden import golden_path, prompt
from family_cases import write_case

from carryall.exporter.export import export_package
from carryall.runtime.llm import LLM
from carryall.runtime.sampling_params import SamplingParams


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "qwen3_moe-unnormalized"])
def test_lowered_to_the_cpu_they_generate_what_transformers_does(case: str, tmp_path: Path) -> None:
    package = export_package(write_case(case, tmp_path / "checkpoint"), tmp_path / "package")
    row = prompt()[0][0].tolist()
    with np.load(golden_path(case)) as golden, LLM(package.path, provider="cpu") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
        result = llm.generate([row], params)[0]
        assert list(result.outputs[0].token_ids) == golden["tokens"][0].tolist()
