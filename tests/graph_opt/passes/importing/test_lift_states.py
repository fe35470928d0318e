"""onnxruntime-genai's operators with states become the standard's; folders of hybrids are opened."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from exporter_golden import golden_path, prompt
from family_cases import write_case
from graph_asserts import apply, assert_same, graph

from carryall import LLM, SamplingParams
from carryall.contract import STATES_OPSET
from carryall.exporter.export import export_package
from carryall.graph_opt.graph.recurrent_states import use_microsoft_states
from carryall.graph_opt.passes.importing.lift_states import LiftStatesPass

CONVOLUTION = "g (float[N, 4, S] x, float[N, 4, 2] s) => (float[N, 4, S] y, float[N, 4, 2] t)"
DELTA = (
    "g (float[N, S, 16] q, float[N, S, 16] k, float[N, S, 16] v, float[N, 2, 8, 8] s, float[N, S, 2] a, "
    "float[N, S, 2] b) => (float[N, S, 16] y, float[N, 2, 8, 8] t)"
)
_CONV = "x, w, , s"
W = np.linspace(-1, 1, 12).astype(np.float32).reshape(4, 1, 3)


@pytest.mark.parametrize(
    ("signature", "operator", "attributes", "dropped", "inputs"),
    [
        (
            CONVOLUTION,
            "CausalConvWithState",
            'activation = "silu"',
            "ndim = 1, state_window = 0",
            "x, w, , s",
        ),
        (CONVOLUTION, "CausalConvWithState", "", "ndim = 1", _CONV),
        (
            DELTA,
            "LinearAttention",
            'q_num_heads = 2, kv_num_heads = 2, update_rule = "gated_delta", scale = 1.0',
            "state_window = 0",
            "q, k, v, s, a, b",
        ),
    ],
)
def test_they_become_standard_operators(
    signature: str, operator: str, attributes: str, dropped: str, inputs: str
) -> None:
    both = ", ".join(filter(None, (attributes, dropped)))
    model = graph(f"{signature} {{ y, t = com.microsoft.{operator} <{both}> ({inputs}) }}", w=W)
    assert apply(LiftStatesPass(), model) == []
    assert model.graph.opset_imports[""] == STATES_OPSET
    expected = f"<{attributes}>" if attributes else ""
    assert_same(model, graph(f"{signature} {{ y, t = {operator} {expected} ({inputs}) }}", w=W))


def test_states_behind_several_tokens_are_refused() -> None:
    body = "y, t = com.microsoft.CausalConvWithState <ndim = 1, state_window = 2> (x, w, , s)"
    model = graph(f"{CONVOLUTION} {{ {body} }}", w=W)
    opset = model.graph.opset_imports[""]
    assert apply(LiftStatesPass(), model) == [
        "it returns states behind several tokens, or has more than one axis"
    ]
    assert model.graph.opset_imports[""] == opset


def write_genai(package: Path, folder: Path, model_type: str) -> None:
    """Write a package with the names, operators and genai_config.json of onnxruntime-genai's builder."""
    shutil.copytree(package, folder, ignore=shutil.ignore_patterns("carryall.json", "*config.json"))
    model = ir.load(folder / "model.onnx")
    for value in [*model.graph.inputs, *model.graph.outputs]:
        if state := re.fullmatch(r"(past|present)_(conv|recurrent)\.(\d+)", str(value.name)):
            value.name = f"{state[1]}.{state[3]}.{state[2]}"
    assert use_microsoft_states(model.graph)
    ir.save(model, folder / "model.onnx")
    decoder = {"filename": "model.onnx"}
    stated = {"type": model_type, "context_length": 128, "vocab_size": 260, "eos_token_id": 257}
    content = {"model": {**stated, "decoder": decoder}, "search": {}}
    (folder / "genai_config.json").write_text(json.dumps(content))


@pytest.mark.long
@pytest.mark.parametrize("case", ["lfm2", "qwen3_5_text-tiles"])
def test_a_folder_of_a_hybrid_writes_the_tokens_of_transformers(case: str, tmp_path: Path) -> None:
    package = export_package(write_case(case, tmp_path / "checkpoint"), tmp_path / "package").path
    write_genai(package, tmp_path / "genai", case)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with LLM(tmp_path / "genai", max_slots=2) as llm, np.load(golden_path(case)) as golden:
        (first,) = llm.generate([prompt()[0][0].tolist()], params)
        expected = golden["tokens"][0].tolist()
        assert first.outputs[0].token_ids == expected
        # The next turn goes on at a state.
        turn = [*prompt()[0][0].tolist(), *expected[:16]]
        (again,) = llm.generate([turn], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        assert again.outputs[0].token_ids == expected[16:]
        assert again.metrics is not None
        assert again.metrics.cached_tokens
