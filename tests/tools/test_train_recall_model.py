"""The texts of the recall model's training ask for what they state."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from recall_texts import BOS, KEYS, OTHERS, VALUES

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(TOOLS))  # where Python finds the modules beside a script
    yield importlib.import_module("train_recall_model")
    sys.path.remove(str(TOOLS))


def test_each_question_asks_for_a_value_that_was_stated(script: ModuleType) -> None:
    ids, targets = script.texts(20, 5, 7, torch.Generator().manual_seed(0))
    for text, wanted in zip(ids.tolist(), targets.tolist(), strict=True):
        stated = dict(zip(text[1:11:2], text[2:11:2], strict=True))
        assert text[0] == BOS
        assert set(stated) <= set(KEYS)
        assert set(stated.values()) <= set(VALUES)
        assert set(text[11:18]) <= set(OTHERS)
        asked = [(place, value) for place, value in enumerate(wanted) if value >= 0]
        assert sorted(text[place] for place, _ in asked) == sorted(stated)
        assert all(stated[text[place]] == value for place, value in asked)
