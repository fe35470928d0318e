"""A model accepts requests after its warm-up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import llguidance
import pytest

from carryall.errors import ProviderRuntimeError, UsageError
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.service.core.served_model import load_served_model
from carryall.runtime.types.sampling_params import SamplingParams
from carryall.runtime.types.structured_output import StructuredOutput


@pytest.mark.parametrize("warm_up", [False, True])
def test_a_model_runs_a_prompt_and_a_token_first(warm_up: bool) -> None:
    served = load_served_model("demo", provider="null", warm_up=warm_up)
    try:
        stats = served.llm.stats()
        assert (stats.generated_tokens, stats.steps) == ((2, 2) if warm_up else (0, 0))
        assert (stats.running, stats.waiting) == (0, 0)
    finally:
        served.llm.shutdown()


def test_a_model_that_cannot_run_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    async def fail(*args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        raise ProviderRuntimeError("the device is on fire")
        yield

    def close(llm: AsyncLLM) -> None:
        closed.append(llm)
        shutdown(llm)

    shutdown = AsyncLLM.shutdown
    monkeypatch.setattr(AsyncLLM, "generate", fail)
    monkeypatch.setattr(AsyncLLM, "shutdown", close)
    with pytest.raises(ProviderRuntimeError, match="on fire"):
        load_served_model("demo", provider="null", warm_up=True)
    assert len(closed) == 1


def test_too_little_kv_memory_is_told_as_such_and_not_as_a_prompt() -> None:
    with pytest.raises(UsageError, match=r"KV memory is too small .*raise kv_bytes"):
        load_served_model("demo", provider="null", warm_up=True, kv_bytes=1)


def test_a_model_that_says_nothing_of_sampling_is_sampled_readably(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    served = load_served_model("demo", provider="null", name="toy")
    served.llm.shutdown()
    assert served.defaults == {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
    (line,) = (one.message for one in caplog.records if "sampling" in one.message)
    assert line.endswith("temperature 0.8, top_k 40, top_p 0.9")


def test_what_a_chat_template_does_not_tell_is_in_the_log_before_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools }}{{ messages[0].content }}")
    with caplog.at_level(logging.WARNING):
        served = load_served_model("demo", provider="null", warm_up=True, chat_template=template)
        served.llm.shutdown()
    assert "calls: the template leaves calls out of past answers" in caplog.text


def test_the_vocabulary_of_grammars_is_read_before_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds with the GIL, in which all streams of a service would stop."""
    read = []
    make = llguidance.LLTokenizer

    def counted(*arguments: Any, **options: Any) -> Any:
        read.append(arguments)
        return make(*arguments, **options)

    monkeypatch.setattr(llguidance, "LLTokenizer", counted)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    served = load_served_model("demo", provider="null", warm_up=True, chat_template=template)
    try:
        assert len(read) == 1
        params = SamplingParams(max_tokens=4, structured_output=StructuredOutput(regex="[0-9]+"))

        async def text() -> str:
            *_, last = [output async for output in served.llm.generate("x", params)]
            return last.outputs[0].text

        assert asyncio.run(text()).isdigit()
        assert len(read) == 1
    finally:
        served.llm.shutdown()
