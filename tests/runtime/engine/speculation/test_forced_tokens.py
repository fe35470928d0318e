"""Tokens that a grammar forces take fewer steps, and equal those generated token by token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llm_kit import toy_model

from carryall.runtime.api.llm import LLM
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.speculation.forced_tokens import ForcedTokens
from carryall.runtime.engine.speculation.prompt_lookup import PromptLookup
from carryall.runtime.types.outputs import CompletionOutput
from carryall.runtime.types.sampling_params import SamplingParams

CITY = {
    "type": "object",
    "properties": {
        "name_of_the_city": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["town", "tower"]},
    },
    "required": ["name_of_the_city", "kind"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json_schema": CITY},
    {"regex": "(the answer is )?[0-9]{2} and nothing else"},
    {"choice": ["certainly", "certain death", "perhaps"]},
    {"regex": "[ab]{40}"},
]


def options(seed: int, form: dict[str, Any] | None, **more: Any) -> SamplingParams:
    base = {"seed": seed, "temperature": 2.0, "max_tokens": 90, "structured_output": form}
    return SamplingParams.from_dict({**base, **more})


MIXED = [options(seed, form) for seed, form in enumerate([*FORMS, None, *FORMS])]
MIXED.append(options(9, FORMS[1], logprobs=1, presence_penalty=1.0, max_tokens=13))


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CompletionOutput]:
    """Return the outputs generated token by token."""
    with monkeypatch.context() as patch, LLM(toy_model(tmp_path, context_length=512)) as llm:
        patch.setattr(ForcedTokens, "evidence", lambda self, request: None)
        outputs = [output.outputs[0] for output in llm.generate(["go"] * len(MIXED), MIXED)]
        assert llm.stats().proposed_tokens == 0
    return outputs


@pytest.fixture(params=[False, True], ids=["forced", "forced and lookup"])
def llm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    model = toy_model(tmp_path, context_length=512)
    model.proposer = PromptLookup() if request.param else None
    with LLM(model, engine_config=EngineConfig(adaptive_speculation=False)) as llm:
        yield llm


def test_the_same_in_fewer_steps(llm: LLM, plain: list[CompletionOutput]) -> None:
    assert [output.outputs[0] for output in llm.generate(["go"] * len(MIXED), MIXED)] == plain
    stats = llm.stats()
    assert stats.accepted_tokens > 100


def test_forced_text_takes_a_step_or_two(tmp_path: Path) -> None:
    config = EngineConfig(adaptive_speculation=False)
    with LLM(toy_model(tmp_path), engine_config=config) as llm:
        params = options(0, {"choice": ["certainly not to be told token by token"]}, temperature=0.0)
        assert llm.generate("go", params)[0].outputs[0].text == "certainly not to be told token by token"
        assert llm.stats().steps <= 4


def test_requests_without_a_grammar_have_nothing_forced() -> None:
    assert ForcedTokens().evidence(Request("a", [1], SamplingParams())) is None
