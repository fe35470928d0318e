"""The provider of docs/adding_a_provider.md, read from the page and run."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from slot_models import VOCAB, reference_logits, save_slot_model

from carryall import providers
from carryall.providers.base import Row, RunnerConfig

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_provider.md"


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a distribution with the page's code and its entry point."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    entry = re.search(r'^ *exact = "(.*)"$', PAGE.read_text(), re.MULTILINE)
    assert code is not None
    assert entry is not None
    module = types.ModuleType("my_package.exact")
    monkeypatch.setitem(sys.modules, "my_package.exact", module)
    exec(code[1], module.__dict__)  # noqa: S102 -- our own page
    point = importlib.metadata.EntryPoint("exact", entry[1], providers.ENTRY_POINT_GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [point])
    providers._third_party.cache_clear()
    yield
    providers._third_party.cache_clear()
    providers.get_provider.cache_clear()


@pytest.mark.usefixtures("_installed")
def test_the_pages_provider_runs(tmp_path: Path) -> None:
    assert "exact" in providers.provider_names()
    provider = providers.get_provider("exact")
    assert provider.available() is None
    assert provider.passes(RunnerConfig(context_length=16))
    model = save_slot_model(tmp_path / "model.onnx")
    tokens = np.arange(6) % VOCAB

    def logits() -> npt.NDArray[np.float32]:
        runner = provider.runner(model, RunnerConfig(max_slots=1, options={"denormals": False}))
        found: npt.NDArray[np.float32] = runner.forward([Row(0, tokens, 0)])[0][-1].copy()
        runner.close()
        return found

    with ThreadPoolExecutor(1) as thread:  # the option changes how its thread computes from then on
        found = thread.submit(logits).result()
    np.testing.assert_allclose(found, reference_logits(tokens)[-1], rtol=1e-4, atol=1e-4)
