"""The script that draws forms writes pictures, and what is on each; none of their words is trained on."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

ROOT = Path(__file__).resolve().parents[2]
FORMS = ROOT / "examples" / "forms"
FONTS = Path("/usr/share/fonts/truetype/dejavu")


@pytest.fixture(scope="module")
def pages() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "tools"))
    yield importlib.import_module("reader_pages")
    sys.path.remove(str(ROOT / "tools"))


@pytest.mark.skipif(not (FONTS / "DejaVuSans.ttf").exists(), reason="needs fonts-dejavu")
def test_forms_are_drawn_as_they_are_written_down(
    pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["reader_pages.py", str(tmp_path), "--fonts", str(FONTS), "--count", "3", "--seed", "2"]
    monkeypatch.setattr(sys, "argv", command)
    pages.main()
    written = json.loads((tmp_path / "written.json").read_text(encoding="utf-8"))
    assert sorted(path.name for path in tmp_path.glob("*.jpg")) == [*written]
    for name, fields in written.items():
        pixels = np.asarray(Image.open(tmp_path / name), np.float32)
        assert pixels.shape == (pages.BAND * len(fields), pages.WIDTH)
        bands = pixels.reshape(len(fields), pages.BAND, pages.WIDTH)
        assert (np.median(pixels) - bands.min((1, 2)) > 60).all()  # ink in each


def test_the_forms_of_the_example_have_the_fields_and_kinds_of_the_script(pages: ModuleType) -> None:
    written = json.loads((FORMS / "written.json").read_text(encoding="utf-8"))
    assert sorted(path.name for path in FORMS.glob("*.jpg")) == [*written]
    for fields in written.values():
        assert [*fields] == [label.lower() for label in pages.FORM]
        assert re.fullmatch(r"[A-Z][a-z]*( [A-Z][a-z]*)*", fields["patient"])
        assert re.fullmatch(r"[A-Z]{1,3}[-/ ]?\d+", fields["order"])
        assert re.fullmatch(r"[\d,.]+( [A-Za-z%/]+)?", fields["total"])
