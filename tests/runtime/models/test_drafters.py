"""``speculative="draft:FOLDER"`` with a drafter: its proposals are its own, the tokens are the model's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import write_case
from safetensors.numpy import load_file, save_file
from tiny_assistant import DRAFTED, GOLDEN, TARGETS, write_assistant
from tiny_eagle import proposals, read, states_entering, write_eagle3
from tiny_medusa import FILE, medusa_logits, write_medusa
from tiny_models import write_tiny

from carryall import LLM, QuantizationRecipe, SamplingParams, export
from carryall.errors import CheckpointError, UnsupportedModelError, UsageError
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.speculation.draft_head import DraftHead
from carryall.runtime.engine.speculation.medusa_heads import MedusaHeads
from carryall.runtime.types.outputs import RequestOutput

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True, logprobs=0),
]
PROMPTS = [np.random.default_rng(length).integers(0, 250, length).tolist() for length in (1, 7, 12, 30)]


def told(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


class Noted:
    """Proposals of a drafter of ``llm``, with the tokens in front of each."""

    def __init__(self, llm: LLM) -> None:
        self.found: list[tuple[list[int], list[int]]] = []
        head = llm.engine._speculator.readers[0]
        assert isinstance(head, DraftHead | MedusaHeads)
        self._propose = head.propose
        head.propose = self  # type: ignore[method-assign]

    def __call__(self, wanted: Sequence[tuple[Request, int]]) -> list[Any]:
        before = [request.token_slice(0, request.num_tokens).tolist() for request, _ in wanted]
        found = self._propose(wanted)
        self.found += zip(before, (tokens.tolist() for tokens in found), strict=True)
        return found


@pytest.mark.long
def test_eagle3_proposes_what_numpy_does(tmp_path: Path) -> None:
    target = write_tiny("llama", tmp_path / "target", num_hidden_layers=7)
    head = write_eagle3(tmp_path / "head", target)
    compared = 0
    with LLM(
        target, max_slots=3, speculative=f"draft:{head}", adaptive_speculation=False, kv_cache_dtype="float32"
    ) as llm:
        noted = Noted(llm)
        llm.generate(PROMPTS, PARAMS[0])
    for before, guesses in noted.found:
        expected, margin = proposals(head, target, (2, 3, 4), before, len(guesses))
        if margin > 1e-2:
            assert guesses == expected
            compared += len(guesses)
    assert compared > 60


@pytest.mark.long
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_eagle3_changes_no_token(family: str, adaptive: bool, tmp_path: Path) -> None:
    windows: dict[str, Any] = {}
    if family == "gemma3_text":
        windows["layer_types"] = ["sliding_attention", "full_attention"] * 3
    target = write_tiny(family, tmp_path / "target", num_hidden_layers=6, **windows)
    head = write_eagle3(tmp_path / "head", target)
    with LLM(target, max_slots=3) as llm:
        expected = [told(llm.generate(PROMPTS, params)) for params in PARAMS]
        vectors = llm.embed(PROMPTS)
    with LLM(target, max_slots=3, speculative=f"draft:{head}", adaptive_speculation=adaptive) as llm:
        assert [told(llm.generate(PROMPTS, params)) for params in PARAMS] == expected
        np.testing.assert_allclose(llm.embed(PROMPTS), vectors, atol=1e-5)
        llm.engine.check_integrity()
        assert adaptive or llm.stats().proposed_tokens > 200


@pytest.mark.long
@pytest.mark.parametrize("method", ["int8-fast", "int4-fast"])
def test_eagle3_beside_quantized_weights(method: str, tmp_path: Path) -> None:
    target = write_tiny("llama", tmp_path / "target", num_hidden_layers=7)
    head = write_eagle3(tmp_path / "head", target)
    with LLM(target, quantize=method, max_slots=3) as llm:
        expected = told(llm.generate(PROMPTS, PARAMS[0]))
    with LLM(
        target, quantize=method, max_slots=3, speculative=f"draft:{head}", adaptive_speculation=False
    ) as llm:
        assert told(llm.generate(PROMPTS, PARAMS[0])) == expected
        assert llm.stats().proposed_tokens > 100


@pytest.mark.long
@pytest.mark.parametrize("case", TARGETS)
def test_an_assistant_of_gemma4_drafts_what_transformers_does(case: str, tmp_path: Path) -> None:
    target = write_case(case, tmp_path / "target")
    assistant = write_assistant(tmp_path / "assistant", target)
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))[case]
    options: dict[str, Any] = {"adaptive_speculation": False, "kv_cache_dtype": "float32", "max_slots": 3}
    with LLM(target, speculative=f"draft:{assistant}", num_speculative_tokens=DRAFTED, **options) as llm:
        noted = Noted(llm)
        for each in recorded:
            *prompt, newest = each["tokens"]

            def force(token_ids: list[int], logits: Any, newest: int = newest) -> Any:
                if not len(token_ids):
                    logits[:] = -np.inf
                    logits[newest] = 0.0
                return logits

            params = SamplingParams(
                temperature=0.0, max_tokens=DRAFTED + 2, ignore_eos=True, logits_processors=(force,)
            )
            llm.generate([prompt], params)
    drafted = {tuple(before): guesses for before, guesses in noted.found}
    for each in recorded:
        assert each["margin"] > 5e-3
        assert drafted[tuple(each["tokens"])] == each["drafted"]


@pytest.mark.long
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("case", TARGETS)
def test_an_assistant_changes_no_token(case: str, adaptive: bool, tmp_path: Path) -> None:
    target = write_case(case, tmp_path / "target")
    assistant = write_assistant(tmp_path / "assistant", target)
    with LLM(target, max_slots=3) as llm:
        expected = [told(llm.generate(PROMPTS, params)) for params in PARAMS]
    with LLM(target, max_slots=3, speculative=f"draft:{assistant}", adaptive_speculation=adaptive) as llm:
        assert [told(llm.generate(PROMPTS, params)) for params in PARAMS] == expected
        llm.engine.check_integrity()
        assert adaptive or llm.stats().proposed_tokens > 200


def test_an_assistant_of_other_sizes_is_refused(tmp_path: Path) -> None:
    target = write_case("gemma4_text", tmp_path / "target")
    assistant = write_assistant(tmp_path / "assistant", target)
    raw = json.loads((assistant / "config.json").read_text())
    for changed, words in (
        ({"backbone_hidden_size": 64}, "drafts for models with a hidden size of 64, not of 32"),
        ({"text_config": {**raw["text_config"], "sliding_window": 6}}, "which no layer behind the first has"),
        ({"text_config": {**raw["text_config"], "global_head_dim": 32}}, "2 heads of 32 elements"),
    ):
        (assistant / "config.json").write_text(json.dumps({**raw, **changed}))
        with pytest.raises(UnsupportedModelError, match=words):
            LLM(target, speculative=f"draft:{assistant}")
    other = write_case("llama", tmp_path / "llama")
    (assistant / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match="does not draft for this model"):
        LLM(other, speculative=f"draft:{assistant}")


def test_medusa_heads_guess_what_numpy_does(tmp_path: Path) -> None:
    target = write_tiny("llama", tmp_path / "target", num_hidden_layers=3)
    heads = write_medusa(tmp_path / "heads")
    norm = read(target)[0]["model.norm.weight"]
    options: dict[str, Any] = {"adaptive_speculation": False, "kv_cache_dtype": "float32", "max_slots": 3}
    with LLM(target, speculative=f"draft:{heads}", **options) as llm:
        noted = Noted(llm)
        llm.generate(PROMPTS, PARAMS[0])
    compared = 0
    for before, found in noted.found:
        stream = states_entering(target, before[:-1])[-1][-1]
        logits = medusa_logits(heads, stream / np.sqrt((stream**2).mean() + 1e-5) * norm)
        best = np.sort(logits, axis=1)
        if (best[:, -1] - best[:, -2]).min() > 1e-2:
            assert found == logits.argmax(axis=1)[: len(found)].tolist()
            compared += len(found)
    assert compared > 60


@pytest.mark.long
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("form", ["checkpoint", "package", "hybrid"])
def test_medusa_heads_change_no_token(form: str, adaptive: bool, tmp_path: Path) -> None:
    if form == "hybrid":
        target = write_case("qwen3_5_text-tiles", tmp_path / "target")
    else:
        target = write_tiny("llama", tmp_path / "target")
    if form == "package":
        export(str(target), tmp_path / "package", quantize=QuantizationRecipe("int8-fast"))
        target = tmp_path / "package"
    heads = write_medusa(tmp_path / "heads")
    with LLM(target, max_slots=3) as llm:
        expected = [told(llm.generate(PROMPTS, params)) for params in PARAMS]
    with LLM(target, max_slots=3, speculative=f"draft:{heads}", adaptive_speculation=adaptive) as llm:
        assert [told(llm.generate(PROMPTS, params)) for params in PARAMS] == expected
        llm.engine.check_integrity()
        assert adaptive or llm.stats().proposed_tokens > 200


def test_medusa_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = write_tiny("llama", tmp_path / "target")
    for sizes in ((16, 260), (32, 250)):
        heads = write_medusa(tmp_path / "other", *sizes)
        with pytest.raises(UsageError, match=f"with hidden size {sizes[0]} and {sizes[1]} tokens"):
            LLM(target, speculative=f"draft:{heads}")
    heads = write_medusa(tmp_path / "heads")
    stored = load_file(heads / FILE)
    without = {name: array for name, array in stored.items() if name != "1.1.linear.bias"}
    for changed, words in (
        ({**stored, "0.9.weight": stored["0.2.weight"]}, "with as many residual blocks"),
        ({**stored, "scale.weight": stored["0.2.weight"]}, "holds the tensor 'scale.weight'"),
        (without, "no tensor '1.1.linear.bias'"),
    ):
        save_file(changed, heads / FILE)
        with pytest.raises(CheckpointError, match=words):
            LLM(target, speculative=f"draft:{heads}")


@pytest.mark.long
def test_what_a_drafter_cannot_serve_is_refused(tmp_path: Path) -> None:
    target = write_tiny("llama", tmp_path / "target", num_hidden_layers=7)
    head = f"draft:{write_eagle3(tmp_path / 'head', target)}"
    for options, words in (
        ({"provider": "cpu:0-2,cpu:3-6"}, "returns no states of layers"),
        ({"tensor_parallel": 2}, "returns no states of layers"),
    ):
        with pytest.raises(UsageError, match=words):
            LLM(target, speculative=head, **options)
    hybrid = write_case("qwen3_5_text", tmp_path / "hybrid")
    with pytest.raises(UnsupportedModelError, match="layers without attention"):
        LLM(hybrid, speculative=head)
    export(str(target), tmp_path / "package", quantize=QuantizationRecipe("int8-fast"))
    with pytest.raises(UsageError, match="is no checkpoint folder, so the drafter"):
        LLM(tmp_path / "package", speculative=head)
