"""Attention to an encoder's rows: targets whose memory has no place for them refuse it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_trocr import write_trocr

from carryall.errors import UnsupportedAttentionError
from carryall.exporter.export import export_model
from carryall.graph_opt.pipeline.pipeline import run
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig


@pytest.mark.parametrize("name", ["cuda", "directml"])
def test_targets_without_a_place_for_the_rows_refuse_them(name: str, tmp_path: Path) -> None:
    provider = get_provider(name)
    passes = provider.passes(provider.resolve_options(RunnerConfig(context_length=20)))
    with pytest.raises(UnsupportedAttentionError, match="attends to rows of an encoder"):
        run(export_model(write_trocr(tmp_path, "vit")), passes)
