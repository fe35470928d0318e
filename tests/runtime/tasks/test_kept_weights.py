"""Quantizing without a text goes on where it was killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import write_tiny

from carryall.exporter.package import DATA_FILE, MODEL_FILE
from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat, Floats, Quantized
from carryall.graph_opt.quantize.weight_methods import UNCALIBRATED
from carryall.runtime.models.float_model import FloatModel
from carryall.runtime.tasks.quantize import quantize


@pytest.mark.long
def test_a_killed_run_goes_on_at_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run rounds only what the first has not, and writes the files of one that was not killed."""
    monkeypatch.setattr("carryall.graph_opt.quantize.formats.weight_only.LEAST_KEPT", 0)
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    checkpoint = write_tiny("llama", tmp_path / "checkpoint")
    quantize(str(checkpoint), tmp_path / "whole", "int4-fast")
    rounded: list[tuple[int, ...]] = []
    plain = UNCALIBRATED["kquant"]

    def algorithm(fails_after: int) -> Callable[..., Quantized]:
        def quantizer(weight: Floats, form: BlockFormat) -> Quantized:
            if len(rounded) == fails_after:
                raise KeyboardInterrupt
            rounded.append(weight.shape)
            return plain(weight, form)

        return quantizer

    monkeypatch.setattr(FloatModel, "quantizer", lambda *_: algorithm(5))
    with pytest.raises(KeyboardInterrupt):
        quantize(str(checkpoint), tmp_path / "killed", "int4-fast")
    assert not (tmp_path / "killed").exists()
    monkeypatch.setattr(FloatModel, "quantizer", lambda *_: algorithm(-1))
    quantize(str(checkpoint), tmp_path / "killed", "int4-fast")
    written = load_model(tmp_path / "whole" / MODEL_FILE).graph.initializers
    assert len(rounded) == sum(name.endswith(".values") for name in written) > 5
    again = load_model(tmp_path / "killed" / MODEL_FILE).graph.initializers
    assert list(written) == list(again)
    for name, value in written.items():
        first, second = value.const_value, again[name].const_value
        assert first is not None
        assert second is not None
        assert first.tobytes() == second.tobytes(), name
    assert not [each for each in (tmp_path / "cache/layers").iterdir() if each.is_dir()]


@pytest.mark.parametrize("works", [True, False])
def test_a_cache_that_cannot_be_used_loses_nothing_but_the_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, works: bool
) -> None:
    monkeypatch.setattr("carryall.graph_opt.quantize.formats.weight_only.LEAST_KEPT", 0)
    checkpoint = write_tiny("llama", tmp_path / "checkpoint")
    quantize(str(checkpoint), tmp_path / "whole", "int4-fast")
    if not works:
        (tmp_path / "file").touch()
        monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "file"))
    quantize(str(checkpoint), tmp_path / "again", "int4-fast")
    whole, again = ((tmp_path / name / DATA_FILE).read_bytes() for name in ("whole", "again"))
    assert whole == again
    assert ("is not kept for a second try" in caplog.text) is not works


def test_small_weights_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    quantize(str(write_tiny("llama", tmp_path / "checkpoint")), tmp_path / "out", "int4-fast")
    assert not list(tmp_path.glob("cache/layers"))
