"""The option ``speculative``: the accepted values, and equal texts with every value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from llm_kit import toy_model

from carryall.cli import carryall
from carryall.errors import UsageError
from carryall.exporter.demo import demo_path
from carryall.providers import get_provider
from carryall.providers.base import Runner
from carryall.providers.runners.paged_runner import PagedBatch
from carryall.providers.targets.null import NullRunner
from carryall.runtime.api.llm import LLM
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.engine.engine import Engine
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.speculation.draft_head import DraftHead
from carryall.runtime.engine.speculation.draft_model import DraftModel
from carryall.runtime.engine.speculation.prompt_lookup import PromptLookup
from carryall.runtime.engine.speculation.proposer import Proposer
from carryall.runtime.models.loading import LoadedModel, load_model
from carryall.runtime.models.speculative import make_proposer
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.sampling_params import SamplingParams

_SCARCE = 70 * 8192  # bytes of KV: three requests of some 40 tokens do not fit


def no_model(name: str) -> LoadedModel:
    raise AssertionError(name)


def no_head(folder: Path | None) -> Runner:
    raise AssertionError(folder)


def no_drafter(folder: Path, limit: Mapping[str, Any]) -> Proposer:
    raise AssertionError(folder, limit)


def test_the_methods(tmp_path: Path) -> None:
    model = toy_model(tmp_path)
    assert isinstance(
        make_proposer("prompt-lookup", None, model, no_model, no_head, no_drafter), PromptLookup
    )
    assert make_proposer("prompt-lookup", 3, model, no_model, no_head, no_drafter).max_tokens == 3
    draft = make_proposer("draft:small", 5, model, lambda name: toy_model(tmp_path), no_head, no_drafter)
    assert isinstance(draft, DraftModel)
    assert draft.max_tokens == 5
    asked: list[Path | None] = []
    states = toy_model(tmp_path)
    states.runner.info = dataclasses.replace(states.runner.info, embedding_size=8)

    def open_head(folder: Path | None) -> Runner:
        asked.append(folder)
        return toy_model(tmp_path).runner

    for method in ("mtp", f"mtp:{tmp_path}"):
        head = make_proposer(method, 2, states, no_model, open_head, no_drafter)
        assert isinstance(head, DraftHead)
        assert head.max_tokens == 2
    assert asked == [None, tmp_path]


@pytest.mark.parametrize(
    ("method", "count", "words"),
    [
        ("ngram", None, "no speculative method 'ngram'; choose prompt-lookup, mtp or draft:MODEL"),
        ("draft:", None, "no speculative method 'draft:'"),
        ("mtp", None, "returns no hidden states of toy"),
        ("mtpx", None, "no speculative method 'mtpx'"),
    ],
)
def test_mistakes_are_refused(method: str, count: int | None, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        make_proposer(method, count, toy_model(tmp_path), no_model, no_head, no_drafter)


def test_a_draft_of_another_tokenizer_is_refused_and_closed(tmp_path: Path) -> None:
    model = toy_model(tmp_path)
    other = toy_model(tmp_path)
    other.tokenizer = Tokenizer(demo_path())
    for draft, words in (
        (toy_model(tmp_path, tokenizer=False), "toy has no tokenizer.json"),
        (other, r"their tokenizers differ \(4096 and 258 tokens"),
    ):
        with pytest.raises(UsageError, match=words):
            make_proposer("draft:other", None, model, lambda name, draft=draft: draft, no_head, no_drafter)  # type: ignore[misc]
        assert isinstance(draft.runner, NullRunner)
        assert draft.runner.closed


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "provider"),
    [
        ("prompt-lookup", "cpu"),
        ("draft:draft", "cpu"),
        pytest.param("prompt-lookup", "openvino", marks=pytest.mark.slow),
        pytest.param("draft:draft", "openvino", marks=pytest.mark.slow),
    ],
)
def test_the_demo_writes_the_same_text(method: str, provider: str) -> None:
    reason = get_provider(provider).available()
    if reason is not None:
        pytest.skip(reason)
    prompts = ["def read(self, size):\n    ", "x = 1\nx = 1\nx = 1\nx =", "import os\n"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=30),
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(seed=4, max_tokens=20, top_p=0.9),
    ]
    options: dict[str, Any] = {"provider": provider, "max_slots": 4, "context_length": 128, "num_threads": 1}
    with LLM("demo", **options) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    options |= {"speculative": method, "num_speculative_tokens": 4}
    for adaptive, kv_bytes in ((False, None), (True, None), (False, _SCARCE)):
        config = EngineConfig(adaptive_speculation=adaptive, kv_bytes=kv_bytes)
        with LLM("demo", engine_config=config, **options) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params)
                assert [output.outputs[0].token_ids for output in outputs] == plain
            stats, metrics = llm.stats(), outputs[1].metrics
            assert metrics is not None
            assert 0 <= metrics.accepted_tokens <= metrics.proposed_tokens <= stats.proposed_tokens
            assert adaptive or stats.accepted_tokens > 10


def test_proposals_of_eight_requests_are_verified_in_one_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that verifies several rows at once runs one inference per step."""
    reason = get_provider("openvino").available()
    if reason is not None:
        pytest.skip(reason)
    from carryall.providers.openvino.sessions import OpenVinoPagedSession

    inferences = 0
    run = OpenVinoPagedSession.run

    def counted(self: OpenVinoPagedSession, batch: PagedBatch) -> Any:
        nonlocal inferences
        inferences += 1
        return run(self, batch)

    monkeypatch.setattr(OpenVinoPagedSession, "run", counted)
    model = load_model("demo", provider="openvino", max_slots=8, context_length=128, num_threads=1)
    assert model.tokenizer is not None
    engine = Engine(model.runner, EngineConfig(adaptive_speculation=False), PromptLookup(4))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [model.tokenizer.encode(f"x{i} = {i}\nx{i} = {i}\nx{i} = {i}\nx{i} =") for i in range(8)]
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    most = 0
    while engine.has_work:
        before = [request.metrics.proposed_tokens for request in requests]
        inferences = 0
        engine.step()
        assert inferences == 1
        after = [request.metrics.proposed_tokens for request in requests]
        most = max(most, sum(now > then for then, now in zip(before, after, strict=True)))
    stats = engine.stats()
    engine.close()
    assert most == 8
    assert stats.accepted_tokens > 8


@pytest.mark.long
def test_the_command_line_takes_it() -> None:
    command = ["run", "demo", "x = 1\nx = 1\nx =", "--max-tokens", "8", "--context-length", "64", "--quiet"]
    plain = CliRunner().invoke(carryall, command)
    assert plain.exit_code == 0, plain.output
    for method in ("prompt-lookup", "draft:draft"):
        options = ["--speculative", method, "--num-speculative-tokens", "3"]
        assert CliRunner().invoke(carryall, [*command, *options]).stdout == plain.stdout
    wrong = CliRunner().invoke(carryall, [*command, "--speculative", "magic"])
    assert (wrong.exit_code, "choose prompt-lookup, mtp or draft:MODEL" in wrong.stderr) == (2, True)
