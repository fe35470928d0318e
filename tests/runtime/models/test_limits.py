"""Requested threads and memory are compared with the machine, and the message has the arithmetic."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from carryall import LLM, EngineConfig
from carryall.errors import UsageError
from carryall.providers.base import RunnerConfig
from carryall.providers.host import machine
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.models.loading import check_budgets, check_memory, check_tables, check_threads
from carryall.runtime.models.model_source import resolve_model


@pytest.fixture(autouse=True)
def here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two cores and a gigabyte, half of it available."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(machine, "memory", lambda: (10**9, 5 * 10**8))


def test_four_threads_a_core_are_the_most() -> None:
    check_threads(8)
    with pytest.raises(UsageError, match=r"num_threads is 9; at most 8 are allowed, 4 for each of"):
        check_threads(9)


def test_slots_must_fit_into_memory() -> None:
    source = resolve_model("draft")
    sizes = source.facts.sizes
    assert sizes is not None
    slot = 64 * sizes.kv_bytes_per_token + 4 * sizes.vocab_size
    most = 5 * 10**8 // slot
    check_memory(source, most, 1024)
    with pytest.raises(UsageError) as caught:
        check_memory(source, most + 1, 1024)
    arithmetic = (
        f"{most + 1} x (64 tokens x {sizes.kv_bytes_per_token} bytes of KV + {sizes.vocab_size} logits"
    )
    assert arithmetic in str(caught.value)
    assert f"lower max_slots to {most} or less" in str(caught.value)


def test_tables_of_all_positions_must_fit_into_memory() -> None:
    source = resolve_model("draft")
    with pytest.raises(UsageError, match=r"context_length 100000000000000 x \d+ bytes of rotary tables"):
        check_tables(source, 10**14)
    check_memory(source, 1, 10**14)  # where angles are computed per step


def test_budgets_must_fit_into_memory() -> None:
    runner = NullRunner(RunnerConfig(max_slots=1), NullOptions())
    check_budgets(EngineConfig(swap_bytes=4 * 10**8, kv_bytes=6 * 10**8), runner.info)
    with pytest.raises(UsageError, match=r"swap_bytes 0.5 GB \+ kv_bytes 0.6 GB is more than the 1 GB"):
        check_budgets(EngineConfig(swap_bytes=5 * 10**8, kv_bytes=6 * 10**8), runner.info)
    elsewhere = dataclasses.replace(runner.info, kv_layout="")  # on a device
    check_budgets(EngineConfig(kv_bytes=6 * 10**9), elsewhere)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_threads": 10**21}, "num_threads is 1000000000000000000000; at most 8"),
        ({"num_threads": 10**8}, "num_threads is 100000000; at most 8"),
        ({"num_threads": 5000}, "num_threads is 5000; at most 8"),
        ({"num_threads": -1}, "num_threads must be an integer of at least 0, not -1"),
        ({"num_threads": True}, "num_threads must be an integer of at least 0, not True"),
        ({"max_slots": 10**7}, "max_slots 10000000 x"),
        ({"max_slots": "4"}, "max_slots must be an integer of at least 1, not '4'"),
        ({"context_length": 0}, "context_length must be a number of tokens, at least 1, or None, not 0"),
        ({"context_length": 10**14}, r"context_length 100000000000000 is not in \[1, "),
        ({"max_step_slowdown": float("nan")}, "max_step_slowdown must be a number of at least 1, not nan"),
        ({"kv_bytes": 10**12}, r"kv_bytes 1 TB is more than the 1 GB"),
        ({"max_slot": 4}, "LLM has no option 'max_slot'; did you mean 'max_slots'"),
        (
            {"provider_options": {"spining": True}},
            "provider 'cpu' has no option 'spining'; did you mean",
        ),
    ],
)
def test_a_model_that_cannot_be_opened_so_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        LLM("draft", **options)


def test_options_of_a_loaded_model_come_too_late(tmp_path: Path) -> None:
    from llm_kit import toy_model

    model = toy_model(tmp_path)
    late: dict[str, Any]
    for late in ({"provider": "cpu"}, {"max_slots": 3}):
        with pytest.raises(UsageError, match=f"toy is already loaded, so {next(iter(late))} cannot be set"):
            LLM(model, **late)
    with LLM(model, engine_config=EngineConfig(attention_sinks=2), prefix_cache=False) as llm:
        config = llm.engine.config
        assert (config.attention_sinks, config.prefix_cache, config.max_slots) == (2, False, 4)


def test_a_model_is_closed_when_no_engine_can_be_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[NullRunner] = []
    monkeypatch.setattr(NullRunner, "close", lambda runner: closed.append(runner))
    with pytest.raises(UsageError, match="max_step_tokens is 1, less than the 2 slots"):
        LLM("draft", provider="null", max_step_tokens=1, max_slots=2)
    with pytest.raises(UsageError, match="swap_bytes 2 GB is more than the 1 GB"):
        LLM("draft", provider="null", swap_bytes=2 * 10**9)
    assert len(closed) == 2
