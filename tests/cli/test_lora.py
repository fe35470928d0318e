"""LoRA adapters on the command line."""

from __future__ import annotations

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
