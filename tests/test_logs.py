"""Logging: content and options, no prompt in a log, nothing on stdout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llm_kit import toy_model

from carryall import logs
from carryall.errors import CarryallError, CarryallWarning, UsageError, WeightWarning
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.llm import LLM
from carryall.runtime.types.sampling_params import SamplingParams

CANARY = "xyzzy-canary"


@pytest.fixture
def loggers() -> Iterator[None]:
    """Restore carryall's loggers after the test."""
    root = logging.getLogger(logs.ROOT)
    before = root.handlers.copy(), root.propagate, root.level
    engine = logging.getLogger("carryall.runtime.engine")
    own = engine.level
    yield
    root.handlers, root.propagate = before[0], before[1]
    root.setLevel(before[2])
    engine.setLevel(own)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("debug", {"carryall": logging.DEBUG}),
        ("WARNING", {"carryall": logging.WARNING}),
        ("runtime.engine=debug, providers=info", {
            "carryall.runtime.engine": logging.DEBUG, "carryall.providers": logging.INFO}),
        ("error,carryall.cli=info", {"carryall": logging.ERROR, "carryall.cli": logging.INFO}),
    ],
)  # fmt: skip
def test_levels(text: str, found: dict[str, int]) -> None:
    assert dict(logs.levels(text)) == found


@pytest.mark.parametrize("text", ["loud", "=debug=", "a b=debug", "runtime=", "runtime=loud"])
def test_levels_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="CARRYALL_LOG must be a level"):
        logs.configure({logs.LEVELS_VARIABLE: text})


def test_the_format_is_text_or_json(loggers: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="CARRYALL_LOG_FORMAT must be text or json, not 'xml'"):
        logs.configure({logs.FORMAT_VARIABLE: "xml"})
    logs.configure({logs.LEVELS_VARIABLE: "runtime.engine=debug", logs.FORMAT_VARIABLE: "json"})
    logging.getLogger("carryall.runtime.engine.engine").debug("hello %d", 1)
    logging.getLogger("carryall.providers.targets.cpu").debug("not asked for")
    written = capsys.readouterr()
    assert written.out == ""
    line = json.loads(written.err)
    assert (line["level"], line["logger"], line["message"]) == (
        "debug",
        "carryall.runtime.engine.engine",
        "hello 1",
    )
    logs.configure({logs.LEVELS_VARIABLE: "debug"})  # in place of the other
    logging.getLogger("carryall.runtime.engine.engine").warning("again")
    (text,) = capsys.readouterr().err.splitlines()
    assert text.endswith("Z WARNING carryall.runtime.engine.engine: again")


def test_warnings_have_classes_of_their_own() -> None:
    assert issubclass(WeightWarning, CarryallWarning)
    assert issubclass(CarryallWarning, UserWarning)
    assert not issubclass(CarryallWarning, CarryallError)


def broken(tokens: list[int], logits: Any) -> Any:
    raise ValueError(CANARY)


def test_no_record_holds_text_of_a_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    keep, root = Keep(logging.DEBUG), logging.getLogger()
    root.addHandler(keep)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    forms: list[dict[str, Any]] = [
        {"stop": [CANARY]},
        {"bad_words": [CANARY]},
        {"structured_output": {"regex": f"{CANARY}[a-z]"}},
        {"structured_output": {"regex": f"{CANARY}(("}},
        {"logits_processors": [broken]},
    ]
    try:
        with caplog.at_level(logging.DEBUG), LLM(toy_model(tmp_path)) as llm:
            llm.generate([CANARY, CANARY], params)
            llm.chat([{"role": "user", "content": CANARY}], params)
            with warnings.catch_warnings(record=True, action="always") as warned:
                for form in forms:
                    with contextlib.suppress(CarryallError):
                        llm.generate(CANARY, SamplingParams(max_tokens=3, **form))
            assert [CANARY in str(warning.message) for warning in warned] == [False]
            for bad in (CANARY * 1000, {CANARY: 1}, CANARY.encode()):
                with pytest.raises(CarryallError):
                    llm.generate(bad)

            async def test() -> None:
                other = AsyncLLM(toy_model(tmp_path))
                async for _ in other.generate(CANARY, params):
                    pass
                other.shutdown()

            asyncio.run(test())
    finally:
        root.removeHandler(keep)
    assert any(record.name.startswith("carryall.runtime.engine") for record in records)
    for record in records:
        assert CANARY not in logs.JsonFormatter().format(record)


PROGRAM = """
import asyncio, sys
from pathlib import Path
import numpy as np
from carryall import LLM, AsyncLLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=3)
for provider in sys.argv[1].split():
    with LLM("draft", provider=provider) as llm:
        llm.generate(["def f(", "x"], params)
        llm.generate("x", SamplingParams(max_tokens=3, structured_output={"json_object": True}))
        if "@" not in provider:
            llm.embed("x")
import carryall.runtime.service.grpc.server
"""


@pytest.mark.long
def test_nothing_that_libraries_print_reaches_stdout(tmp_path: Path) -> None:
    environment = {**os.environ, "CARRYALL_LOG": "debug", "CARRYALL_LOG_FORMAT": "json"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "cpu openvino cpu@process:0-2"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert any(line["logger"] == "carryall.runtime.engine.engine" for line in lines)


def test_a_variable_that_states_something_else_is_a_warning() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import carryall; print(carryall.__version__)"],
        capture_output=True,
        text=True,
        env={**os.environ, "CARRYALL_LOG": "loud"},
        check=True,
    )
    assert "CarryallWarning: CARRYALL_LOG must be a level" in done.stderr
    assert done.stdout.count("\n") == 1
