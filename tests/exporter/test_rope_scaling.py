"""Rope scalings that the user chooses: transformers' results, the configuration, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from exporter_golden import NEW_TOKENS, golden_path, prompt
from tiny_encoders import write_tiny_encoder
from tiny_gguf import write_gguf
from tiny_models import tiny_config, write_tiny

from carryall import LLM, SamplingParams, export
from carryall.cli import carryall as verbs
from carryall.errors import UnsupportedModelError, UsageError
from carryall.exporter.config import context_lengths
from carryall.exporter.family import normalised_config
from carryall.exporter.rope_scaling import scaled_config
from carryall.runtime.models.config import ModelConfig
from carryall.runtime.service.core.model_folder import encoder_loader
from carryall.runtime.tasks.plan import plan

ORIGINAL = 32  # tokens; the golden files hold positions up to 46
GOLDEN: dict[str, dict[str, Any]] = {"llama-yarn": {"head_dim": 16}, "llama-linear": {}}
SCALINGS = {"llama-yarn": "yarn:4", "llama-linear": "linear:3"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))


def greedy(model: Path, **options: Any) -> tuple[int, list[list[int]]]:
    """The context length of a model, and its tokens after the prompts of the golden files."""
    input_ids, mask = prompt()
    prompts = [row[real == 1].tolist() for row, real in zip(input_ids, mask, strict=True)]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    with LLM(model, max_slots=2, **options) as llm:
        found = [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]
        return llm.context_length, found


@pytest.mark.parametrize("case", GOLDEN)
def test_greedy_tokens_beyond_the_original_context_equal_transformers(case: str, tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "tiny", max_position_embeddings=ORIGINAL, **GOLDEN[case])
    with np.load(golden_path(case)) as golden:
        expected = golden["tokens"].tolist()
    context, found = greedy(folder, rope_scaling=SCALINGS[case])
    assert (context, found) == (ORIGINAL * int(SCALINGS[case][-1]), expected)
    context, plain = greedy(folder)  # the cache tells the two apart
    assert context == ORIGINAL
    assert plain != expected


def test_a_package_has_the_scaling(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "tiny", max_position_embeddings=ORIGINAL, head_dim=16)
    _, expected = greedy(folder, rope_scaling="yarn:4")
    export(folder, tmp_path / "package", rope_scaling="yarn:4")
    written = json.loads((tmp_path / "package" / "config.json").read_text())
    assert written["rope_parameters"] == YARN
    assert greedy(tmp_path / "package") == (128, expected)


def test_a_gguf_file_is_scaled_as_one_that_states_it(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"max_position_embeddings": ORIGINAL, "head_dim": 16}
    plain, stated = tmp_path / "plain.gguf", tmp_path / "stated.gguf"
    write_gguf("llama", plain, **sizes)
    write_gguf("llama", stated, rope_parameters=YARN, **sizes)
    expected = greedy(stated)
    assert expected[0] == 128
    assert greedy(plain, rope_scaling="yarn:4") == expected
    assert greedy(plain)[1] != expected[1]


@pytest.mark.parametrize(
    ("model_type", "overrides", "scaling", "expected"),
    [
        # Another factor of the same type: its original context and its other parameters stay.
        ("llama", {"rope_parameters": {**YARN, "beta_fast": 16.0}}, "yarn:8", ("yarn", 8.0, 256)),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            "linear:8",
            ("linear", 8.0, 256),
        ),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "yarn:2", ("yarn", 2.0, 256)),
        ("llama", {}, "dynamic:2", ("dynamic", 2.0, 256)),
        # As transformers 4 wrote it.
        ("llama", {"rope_parameters": None, "rope_theta": 1e4}, "yarn:2", ("yarn", 2.0, 256)),
        ("qwen2_vl", {}, "yarn:2", ("yarn", 2.0, 256)),
        ("gemma3_text", {}, "yarn:2", ("yarn", 2.0, 256)),
    ],
)
def test_the_context_is_the_factor_times_the_original(
    model_type: str, overrides: dict[str, Any], scaling: str, expected: tuple[str, float, int]
) -> None:
    raw = {**tiny_config(model_type, **overrides), "max_position_embeddings": 128}
    before, after = normalised_config(raw), scaled_config(raw, scaling)
    layers = zip(before.ropes, normalised_config(after).ropes, before.windows, strict=True)
    changed = [(old, new) for old, new, window in layers if old != new and window is None]
    kept = ("theta", "rotary_dim", "beta_fast", "beta_slow")
    assert changed
    for old, new in changed:
        assert new is not None
        assert (new.rope_type, new.factor, context_lengths(after)[0]) == expected
        assert [getattr(old, name) for name in kept] == [getattr(new, name) for name in kept]
    assert raw == {**tiny_config(model_type, **overrides), "max_position_embeddings": 128}


def test_layers_with_windows_keep_their_rope() -> None:
    raw = tiny_config("gemma3_text")
    before, after = normalised_config(raw), normalised_config(scaled_config(raw, "yarn:2"))
    ropes = list(zip(before.ropes, after.ropes, before.windows, strict=True))
    kinds = {new.rope_type for _, new, window in ropes if new is not None and window is not None}
    assert kinds == {"default"}


@pytest.mark.parametrize(
    ("model_type", "overrides", "scaling", "words"),
    [
        ("gpt2", {}, "yarn:4", "has no rotary embedding"),
        ("bloom", {}, "yarn:4", "has no rotary embedding"),
        ("phi3", {}, "yarn:4", "cannot replace the rope type 'longrope'"),
        ("llama", {"rope_parameters": YARN}, "linear:2", "cannot replace the rope type 'yarn'"),
        ("qwen2_vl", {}, "dynamic:2", "rope type 'dynamic' is not supported"),
    ],
)
def test_ropes_that_cannot_be_scaled(
    model_type: str, overrides: dict[str, Any], scaling: str, words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        scaled_config(tiny_config(model_type, **overrides), scaling)


def test_a_context_beyond_any_model() -> None:
    raw = {**tiny_config("llama"), "max_position_embeddings": 2**20}
    with pytest.raises(UsageError, match="choose a smaller factor"):
        scaled_config(raw, "yarn:1000")


@pytest.mark.parametrize(
    "value", ["yarn", "yarn:0", "yarn:-1", "yarn:nan", "yarn:inf", "yarn:1e9", "foo:2", "yarn:4:5", ":4", ""]
)
def test_values_that_are_no_scaling(value: str) -> None:
    result = CliRunner().invoke(verbs, ["run", "demo", "hello", "--rope-scaling", value])
    assert result.exit_code == 2
    assert "rope_scaling must be TYPE:FACTOR, such as yarn:4" in result.stderr
    assert len(result.stderr.splitlines()) <= 4


def test_a_package_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "tiny")
    export(folder, tmp_path / "package")
    with pytest.raises(UsageError, match="carryall export SRC DST --rope-scaling yarn:4"):
        LLM(tmp_path / "package", rope_scaling="yarn:4")


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path / "encoder", "bert")
    with pytest.raises(UsageError, match="is a text encoder"):
        encoder_loader(ModelConfig(model=folder, rope_scaling="yarn:4"), warm_up=False)
    with pytest.raises(UsageError, match="is a text encoder"):
        export(folder, tmp_path / "package", rope_scaling="yarn:4")


def test_a_plan_is_of_the_longer_context(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "tiny")
    report = plan(folder, bandwidth=1e10, rope_scaling="yarn:4")
    assert report.context_length == 512
    assert report.command.endswith("--rope-scaling yarn:4")


def test_a_context_that_is_too_long_names_the_option(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "tiny")
    with pytest.raises(UsageError, match=r"not in \[1, 128\].*--rope-scaling yarn:4"):
        LLM(folder, context_length=100_000)
    with LLM(folder, rope_scaling="yarn:4", context_length=300) as llm:
        assert llm.context_length == 300
