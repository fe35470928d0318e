"""``speculative="mtp"``: the same tokens as without, and clear refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from family_cases import write_case
from tiny_heads import write_with_head

import carryall
from carryall import LLM, QuantizationRecipe, SamplingParams, export
from carryall.errors import PackageError, UsageError
from carryall.exporter.config import types
from carryall.runtime.engine.speculation.draft_head import DraftHead
from carryall.runtime.types.outputs import RequestOutput

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, logprobs=0),
]
PROMPTS = [np.random.default_rng(length).integers(0, 250, length).tolist() for length in (1, 7, 12, 30)]


def told(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.long
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("case", ["qwen3_5_text-tiles", "qwen3_5_text", "llama", "glm4_moe", "deepseek_v3"])
def test_a_head_changes_no_token(case: str, adaptive: bool, tmp_path: Path) -> None:
    model = write_with_head(case, tmp_path / "checkpoint")
    with LLM(model, max_slots=3) as llm:
        expected = [told(llm.generate(PROMPTS, params)) for params in PARAMS]
    with LLM(model, max_slots=3, speculative="mtp", adaptive_speculation=adaptive) as llm:
        assert [told(llm.generate(PROMPTS, params)) for params in PARAMS] == expected
        llm.engine.check_integrity()
        assert adaptive or llm.stats().proposed_tokens > 300


@pytest.mark.long
def test_a_head_of_the_frequent_tokens_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(types, "DRAFTED_TOKENS", 64)
    model = write_with_head("qwen3_5_text-tiles", tmp_path / "checkpoint")
    with LLM(model, max_slots=3) as llm:
        expected = [told(llm.generate(PROMPTS, params)) for params in PARAMS]
    with LLM(model, max_slots=3, speculative="mtp", adaptive_speculation=False) as llm:
        head = llm.engine._speculator.readers[0]
        assert isinstance(head, DraftHead)
        propose, proposed = head.propose, list[int]()

        def noted(wanted: list[tuple[object, int]]) -> list[np.ndarray]:
            found = propose(wanted)  # type: ignore[arg-type]
            proposed.extend(token for guesses in found for token in guesses.tolist())
            return found

        head.propose = noted  # type: ignore[assignment,method-assign]
        assert [told(llm.generate(PROMPTS, params)) for params in PARAMS] == expected
    assert len(proposed) > 300
    assert max(proposed) < 64 <= max(token for part in expected for text in part for token in text)


@pytest.mark.long
def test_a_head_proposes_what_it_computes_of_the_models_states(tmp_path: Path) -> None:
    """A head whose layer adds nothing repeats the model's own choice: it proposes each newest token again."""
    from safetensors.numpy import load_file, save_file

    model = write_with_head("llama", tmp_path / "checkpoint")
    tensors = load_file(model / "model.safetensors")
    hidden = len(tensors["mtp.norm.weight"])
    ones = np.ones(hidden, np.float32)
    for name, array in tensors.items():
        if name.startswith("mtp."):
            tensors[name] = np.zeros(array.shape, np.float32) if array.ndim > 1 else ones
    tensors["mtp.fc.weight"] = np.concatenate(
        [np.zeros((hidden, hidden)), np.eye(hidden)], 1, dtype=np.float32
    )
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    proposals: list[tuple[int, list[int]]] = []
    with LLM(model, max_slots=1, speculative="mtp", adaptive_speculation=False) as llm:
        head = llm.engine._speculator.readers[0]
        assert isinstance(head, DraftHead)
        propose = head.propose

        def noted(wanted: list[tuple[object, int]]) -> list[np.ndarray]:
            found = propose(wanted)  # type: ignore[arg-type]
            newest = wanted[0][0].token_slice(0, wanted[0][0].num_tokens)[-1]  # type: ignore[attr-defined]
            proposals.append((int(newest), found[0].tolist()))
            return found

        head.propose = noted  # type: ignore[assignment,method-assign]
        llm.generate([PROMPTS[1][:3]], PARAMS[0])
    # norm(states) keeps their direction, so the output head's best token stays that of the model: the newest.
    right = [newest == guesses[0] for newest, guesses in proposals if guesses]
    assert len(right) > 5
    assert all(right)


def test_what_has_no_head_is_refused(tmp_path: Path) -> None:
    plain = write_case("llama", tmp_path / "plain")
    for method in ("mtp", f"mtp:{plain}"):
        with pytest.raises(UsageError, match="has no head that predicts further tokens"):
            LLM(plain, speculative=method)
    olmo = write_case("olmo2", tmp_path / "olmo")
    with pytest.raises(UsageError, match="its family has none"):
        LLM(olmo, speculative="mtp")


@pytest.mark.long
def test_the_head_of_another_folder_and_quantized_weights(tmp_path: Path) -> None:
    head = write_with_head("llama", tmp_path / "head")
    plain = write_case("llama", tmp_path / "plain")
    for method in (None, "int8-fast", "int4-fast"):
        with LLM(plain, quantize=method, max_slots=3) as llm:
            expected = told(llm.generate(PROMPTS, PARAMS[0]))
        with LLM(plain, quantize=method, max_slots=3, speculative=f"mtp:{head}") as llm:
            assert told(llm.generate(PROMPTS, PARAMS[0])) == expected


@pytest.mark.long
def test_a_package_has_the_head_of_its_checkpoint(tmp_path: Path) -> None:
    checkpoint = write_with_head("qwen3_5_text-tiles", tmp_path / "checkpoint")
    for method in (None, "int8-fast"):
        package = tmp_path / str(method)
        recipe = None if method is None else QuantizationRecipe(method)
        export(str(checkpoint), package, quantize=recipe)
        with LLM(package, max_slots=3) as llm:
            expected = told(llm.generate(PROMPTS, PARAMS[0]))
        with LLM(package, max_slots=3, speculative="mtp", adaptive_speculation=False) as llm:
            assert told(llm.generate(PROMPTS, PARAMS[0])) == expected
            assert llm.stats().proposed_tokens > 0
    carryall.quantize(checkpoint, tmp_path / "quantized", "int8-fast")
    carryall.quantize(tmp_path / "None", tmp_path / "again", "int8-fast")
    for name in ("quantized", "again"):
        with LLM(tmp_path / name, max_slots=3, speculative="mtp", adaptive_speculation=False) as llm:
            assert told(llm.generate(PROMPTS, PARAMS[0])) == expected
            assert llm.stats().proposed_tokens > 0
        files = [(tmp_path / each / "mtp.onnx.data").read_bytes() for each in (name, "int8-fast")]
        assert files[0] == files[1]
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name).glob("mtp.onnx*"))
        for name in ("None", "int8-fast")
    ]
    assert sizes[1] < 0.6 * sizes[0]
    (tmp_path / "None" / "mtp.onnx").write_bytes(b"damaged")
    with pytest.raises(PackageError, match=r"mtp\.onnx"):
        LLM(tmp_path / "None", speculative="mtp")


def test_a_rotated_model_has_no_head(tmp_path: Path) -> None:
    checkpoint = write_with_head("llama", tmp_path / "checkpoint")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, range(900))), encoding="utf-8")
    recipe = QuantizationRecipe("int8", calibration=str(text), calibration_tokens=512, rotate=True)
    export(str(checkpoint), tmp_path / "package", quantize=recipe)
    with pytest.raises(UsageError, match="rotation of its hidden states"):
        LLM(tmp_path / "package", speculative="mtp")
