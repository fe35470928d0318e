"""Which passes of a provider lower a graph: those of ``cuda``, which has three kinds of KV memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from family_cases import write_case
from tiny_models import write_tiny

from carryall.contract import EXPLICIT_KV, SEQLENS_K, SLOT_KV
from carryall.errors import UnsupportedAttentionError
from carryall.exporter.export import export_model
from carryall.graph_opt.lower.paged_kv import TABLE
from carryall.graph_opt.pipeline.pipeline import run
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
from carryall.providers.lowering import lowered

KINDS = {TABLE: "paged", SEQLENS_K: "slots"}


def memory_of(checkpoint: Path, name: str = "cuda", **options: Any) -> tuple[str, dict[str, str]]:
    """Return the KV memory of a lowered graph, and the reasons in its metadata."""
    config = RunnerConfig(context_length=32, options=options)
    model = lowered(get_provider(name), config, lambda way: run(export_model(checkpoint), way.passes)[0])
    reasons = {
        key: model.metadata_props[key] for key in (SLOT_KV, EXPLICIT_KV) if key in model.metadata_props
    }
    return kind_of(model), reasons


def kind_of(model: ir.Model) -> str:
    inputs = (str(value.name) for value in model.graph.inputs)
    return next((KINDS[name] for name in inputs if name in KINDS), "explicit")


def test_kv_is_in_blocks_by_default_and_in_what_is_asked_for(tmp_path: Path) -> None:
    checkpoint = write_tiny("llama", tmp_path / "c")
    assert memory_of(checkpoint) == ("paged", {})
    for memory in ("paged", "slots"):
        assert memory_of(checkpoint, kv_memory=memory) == (memory, {})


def test_heads_that_blocks_cannot_have_are_in_slots_by_default(tmp_path: Path) -> None:
    checkpoint = write_tiny("llama", tmp_path / "c", head_dim=320)
    memory, reasons = memory_of(checkpoint)
    assert memory == "slots"
    assert "has heads of 320; PagedAttention has sizes divisible by 8, up to 256" in reasons[SLOT_KV]
    assert memory_of(checkpoint, kv_memory="slots") == ("slots", {})
    memory, reasons = memory_of(checkpoint, kv_memory="paged")
    assert memory == "explicit"
    assert "has heads of 320" in reasons[EXPLICIT_KV]


def test_layers_with_different_heads_are_in_slots_by_default(tmp_path: Path) -> None:
    memory, reasons = memory_of(write_case("gemma4_text-experts-one-projection", tmp_path / "c"))
    assert memory == "slots"
    assert "has 1 KV heads, " in reasons[SLOT_KV]
    assert reasons[SLOT_KV].endswith("has 2; blocks need equal")


@pytest.mark.parametrize("case", ["bloom", "falcon-alibi-sequential"])
def test_biases_by_distance_are_in_neither(case: str, tmp_path: Path) -> None:
    """ALiBi has a mask for each head, which neither of the two operators takes."""
    checkpoint = write_case(case, tmp_path / "c")
    for options in ({}, {"kv_memory": "slots"}, {"kv_memory": "paged"}):
        memory, reasons = memory_of(checkpoint, **options)
        assert memory == "explicit"
        assert "one mask for all heads" in reasons[EXPLICIT_KV]


def test_states_are_in_neither(tmp_path: Path) -> None:
    checkpoint = write_case("lfm2", tmp_path / "c")
    for options in ({}, {"kv_memory": "slots"}, {"kv_memory": "paged"}):
        memory, reasons = memory_of(checkpoint, **options)
        assert memory == "explicit"
        assert reasons.keys() == {EXPLICIT_KV}
        assert "recurrent states" in reasons[EXPLICIT_KV]


def test_without_explicit_passes_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedAttentionError, match=r"recurrent states.*; the provider cpu computes it"):
        memory_of(write_case("lfm2", tmp_path / "c"), "directml")
