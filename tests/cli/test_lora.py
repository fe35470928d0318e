"""LoRA adapters on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tiny_lora import layers_of, write_adapter
from tiny_models import write_tiny

from carryall.cli import carryall


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Result]:
    """Run a command in a folder with a base model and the adapters a and b."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    base = write_tiny("llama", Path("base"), dtype=np.float32)
    for seed, name in enumerate("ab"):
        write_adapter(Path(name), layers_of(base), seed=seed)
    return lambda text: CliRunner().invoke(carryall, text.split())


@pytest.mark.long
def test_run_and_batch_use_adapters(run: Callable[[str], Result]) -> None:
    options = "--temperature 0 --max-tokens 6 -q"
    texts = {
        lora: run(f"run base x --raw {options} --json {f'--lora {lora}={lora}' if lora else ''}")
        for lora in ("", "a", "b")
    }
    assert [one.exit_code for one in texts.values()] == [0, 0, 0]
    found = {lora or "base": json.loads(one.stdout)["text"] for lora, one in texts.items()}
    assert len(set(found.values())) == 3

    sampling = {"temperature": 0, "max_tokens": 6}
    lines = [
        {"custom_id": name, "url": "/v1/completions", "body": {"model": name, "prompt": "x", **sampling}}
        for name in ("a", "base", "b")
    ]
    Path("in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = run("batch run in.jsonl -o out.jsonl --model base --lora a=a --lora b=b --max-loras 1 -q")
    assert done.exit_code == 0, done.output
    answers = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    bodies = {one["custom_id"]: one["response"]["body"] for one in answers}
    assert {name: body["model"] for name, body in bodies.items()} == {"a": "a", "base": "base", "b": "b"}
    assert {name: body["choices"][0]["text"] for name, body in bodies.items()} == found

    same = run("batch run in.jsonl -o out.jsonl --model base --lora a=a --lora b=b -q")
    assert same.exit_code == 0  # it is finished
    changed = run("batch run in.jsonl -o out.jsonl --model base --lora a=b --lora b=b -q")
    assert changed.exit_code == 2
    assert "model.lora a: " in " ".join(changed.output.split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run base x --lora a=a --lora b=b", "--lora is given for a, b; this command uses one adapter"),
        ("run base x --lora a", "'a' is not NAME=VALUE"),
        ("run base x --lora a=missing", "missing is not a LoRA adapter: it has no adapter_config.json"),
        ("serve --models . --lora a=a", "--lora needs one model"),
    ],
)
def test_wrong_adapters_are_refused(run: Callable[[str], Result], command: str, message: str) -> None:
    result = run(command)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
