"""Quantizing without a text goes on where it was killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import write_tiny

from carryall.exporter.package import MODEL_FILE
from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat, Floats, Quantized
from carryall.graph_opt.quantize.weight_methods import UNCALIBRATED
from carryall.runtime.models.float_model import FloatModel
from carryall.runtime.tasks.quantize import quantize
from carryall.storage.root import cache_root


@pytest.mark.long
def test_a_killed_run_goes_on_at_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run rounds only what the first has not, and writes the files of one that was not killed."""
    monkeypatch.setattr("carryall.graph_opt.quantize.formats.weight_only.LEAST_KEPT", 0)
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
    assert not [each for each in (cache_root() / "layers").iterdir() if each.is_dir()]
