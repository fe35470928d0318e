"""Mixed precision with a budget of bits or a limit of KL."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.errors import UsageError
from carryall.exporter.export import export_model
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.formats.weight_only import WeightFormats
from carryall.graph_opt.quantize.search.budget import (
    FormatChoice,
    choices,
    promote,
    spend_bits,
    spend_divergence,
)
from carryall.graph_opt.quantize.search.weight_inputs import WeightInputs

INT4, INT8 = BlockFormat(), BlockFormat(bits=8)


def made_up(*divergences: float, size: int = 320) -> dict[str, list[FormatChoice]]:
    """Return weights of one size with these divergences in int4 and a hundredth of them in int8."""
    return {
        f"w{i}": [
            FormatChoice(INT4, 5 * size, one),
            FormatChoice(INT8, 9 * size, one / 100),
            FormatChoice(None, 32 * size, 0),
        ]
        for i, one in enumerate(divergences)
    }


def test_sensitive_weights_get_more_bits() -> None:
    plan = spend_bits(made_up(0.1, 0.5, 0.2, 0.01), 7.0)
    assert plan.overrides == {"w1": INT8, "w2": INT8}
    assert plan.bits == 7.0
    assert plan.divergence == pytest.approx(0.1 + 0.005 + 0.002 + 0.01)
    assert spend_bits(made_up(0.1, 0.5), 32).overrides == {"w0": None, "w1": None}


def test_greedy_is_near_the_best_of_all_plans() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        found = made_up(*rng.exponential(size=5))
        plan = spend_bits(found, 9.0)
        best = min(
            sum(one.divergence for one in combination)
            for combination in itertools.product(*found.values())
            if sum(one.bits for one in combination) <= 9.0 * 5 * 320
        )
        assert plan.bits <= 9.0
        assert plan.divergence <= 1.5 * best + 1e-9


def test_a_low_budget_names_the_required_bits() -> None:
    with pytest.raises(UsageError, match=r"budget of 4.5 bits cannot be met; the minimum is 5.000 bits"):
        spend_bits(made_up(0.1, 0.2), 4.5)


def test_the_measured_divergence_meets_the_limit() -> None:
    found = made_up(0.1, 0.5, 0.2, 0.01)

    def worse_than_the_sum(forms: dict[str, BlockFormat | None]) -> float:
        by_form = ({step.form: step.divergence for step in found[name]}[form] for name, form in forms.items())
        return 3 * sum(by_form)

    plan = spend_divergence(found, 0.4, worse_than_the_sum)  # type: ignore[arg-type]
    assert plan.divergence <= 0.4
    assert plan.overrides == {"w1": INT8, "w2": INT8}
    with pytest.raises(UsageError, match=r"divergence of 0.001 cannot be met; the smallest found is 1"):
        spend_divergence(found, 0.001, lambda _: 1.0)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> WeightInputs:
    folder = tmp_path_factory.mktemp("budget")
    path = folder / "float.onnx"
    model = export_model(write_tiny("llama", folder / "checkpoint", tie_word_embeddings=True))
    ir.save(model, path, external_data="float.onnx.data")
    windows = [np.random.default_rng(i).integers(0, 256, 48) for i in range(3)]
    return WeightInputs(path, windows, WeightFormats(BlockFormat(block_size=16)), context_length=64)


def test_divergences_are_measured(runner: WeightInputs) -> None:
    assert runner.divergence({}) == 0
    assert len(runner.forms) == 15
    found = choices(runner)
    for name, (int4, int8, exact) in found.items():
        assert int4.divergence > 0
        measured = runner.divergence({name: int8.form})
        assert int8.divergence == pytest.approx(measured, rel=0.6, abs=1e-7)  # from the errors' ratio
        assert exact.divergence == 0
        assert int4.bits == 5 * runner.sizes[name]  # 4, and a scale of 16 for 16
    everything = runner.divergence({name: steps[0].form for name, steps in found.items()})
    assert everything == pytest.approx(sum(steps[0].divergence for steps in found.values()), rel=0.5)


def test_more_bits_never_diverge_more(runner: WeightInputs) -> None:
    found = choices(runner)
    plans = [spend_bits(found, bits) for bits in (6, 7, 8, 10, 32)]
    measured = [
        runner.divergence({name: plan.overrides.get(name, steps[0].form) for name, steps in found.items()})
        for plan in plans
    ]
    assert measured == sorted(measured, reverse=True)
    assert [plan.bits for plan in plans[:3]] == pytest.approx([6, 7, 8], abs=0.2)


def test_known_weights_get_8_bits_before_the_kinds_that_are_measured(runner: WeightInputs) -> None:
    known = ["model.layers.0.mlp.down_proj.weight"]
    wide, plain = BlockFormat(bits=8, block_size=16), BlockFormat(block_size=16)
    added = 4 * runner.sizes[known[0]]  # bits
    narrow = sum(5 * size for size in runner.sizes.values()) + 32 * sum(runner.float_sizes.values())
    alone = promote(runner, 1.001 * added / narrow, known)
    assert alone.overrides == {known[0]: wide}
    assert alone.bits == pytest.approx(
        (narrow + added) / (sum(runner.sizes.values()) + sum(runner.float_sizes.values()))
    )
    both = promote(runner, 0.4, known)
    assert known[0] in both.overrides
    measured = both.overrides.keys() - {known[0]}
    assert measured
    assert measured == {name for name in measured | {known[0]} if name.startswith("model")} - {known[0]}
    assert runner.divergence(dict.fromkeys(runner.forms, plain) | both.overrides) < runner.divergence(
        dict.fromkeys(runner.forms, plain) | alone.overrides
    )


def test_known_weights_that_exceed_the_share_are_measured_as_all_others(runner: WeightInputs) -> None:
    known = list(runner.forms)
    assert promote(runner, 0.2, known) == promote(runner, 0.2)


def test_the_record_names_the_weights_with_more_bits(runner: WeightInputs, tmp_path: Path) -> None:
    plan = spend_divergence(choices(runner), 1e-4, runner.divergence)
    record = plan.record()
    assert record["divergence"] <= 1e-4
    assert sum(len(names) for names in record.values() if isinstance(names, list)) == len(plan.overrides)
