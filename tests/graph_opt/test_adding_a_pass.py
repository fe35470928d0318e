"""The code in docs/adding_a_pass.md works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import graph_asserts
import numpy as np
import pytest

from carryall.graph_opt.plugins import load_pass

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "adding_a_pass.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def my_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "my_passes.py").write_text(blocks()[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    made = load_pass("my_passes:DivisionPass")
    return {"DivisionPass": type(made), "np": np, **vars(graph_asserts)}


def test_the_documented_pass_passes_its_documented_tests(my_passes: dict[str, Any]) -> None:
    exec(compile(blocks()[1], str(DOCUMENT), "exec"), my_passes)  # noqa: S102 -- our own document
    tests = [value for name, value in my_passes.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_an_integer_division_stays(my_passes: dict[str, Any]) -> None:
    model = graph_asserts.graph("g (int64[N] x) => (int64[N] y) { y = Div(x, c) }", c=np.int64(4))
    assert graph_asserts.apply(my_passes["DivisionPass"](), model) == ["the divisor is an integer or zero"]
