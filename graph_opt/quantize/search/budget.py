"""Mixed precision: choose the bits of each weight within a budget of size or of error.

The sensitivity of a weight is the Kullback-Leibler divergence of the model's predictions when only that
weight is rounded. It grows with the square of the weight's error, so the divergence with more bits follows
from the two errors. Divergences of several weights are approximately additive. The budget is spent greedily
by gain per bit, the usual heuristic for multiple-choice knapsacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ....errors import UsageError
from ....progress import Progress
from ....records import dataclass
from ...graph.graph_facts import layer_pattern
from ..algorithms.blockwise import BlockFormat
from .weight_inputs import WeightInputs

_FLOAT_BITS, _SCALE_BITS = 32, 16
_NARROW = 4
_ATTEMPTS = 8  # plans that are measured to meet a divergence
_ENOUGH = 0.85  # share of the allowed divergence at which the search stops


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """A format of a weight: its total bits including scales, and the divergence that it causes alone."""

    form: BlockFormat | None
    bits: float
    divergence: float


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """The formats chosen for a budget.

    Attributes:
        overrides: formats of the weights that do not have the cheapest one; None for float.
        bits: mean bits per weight, including scales.
        divergence: mean divergence in nats; measured for a budget of error, else the expected sum.
    """

    overrides: dict[str, BlockFormat | None]
    bits: float
    divergence: float

    def record(self) -> dict[str, Any]:
        """Return the entry of a package's record."""
        stored: dict[str, list[str]] = {}
        for name, form in sorted(self.overrides.items()):
            stored.setdefault("float" if form is None else f"int{form.bits}", []).append(name)
        return {"bits_a_weight": round(self.bits, 4), "divergence": float(f"{self.divergence:.4g}"), **stored}


def choices(runner: WeightInputs, progress: Progress | None = None) -> dict[str, list[FormatChoice]]:
    """Measure the possible formats of each weight, by name, cheapest first; runs the text once per weight.

    Weights without a format have the single choice float, because they count in a budget of bits too.
    """
    options = {
        name: [FormatChoice(None, _FLOAT_BITS * size, 0.0)] for name, size in runner.float_sizes.items()
    }
    for number, (name, form) in enumerate(runner.forms.items()):
        size = runner.sizes[name]
        divergence = runner.divergence({name: form})
        ladder = [form] if form.bits == 8 else [form, runner.wide(name)]
        errors = [max(runner.error(name, step), 1e-30) for step in ladder]
        options[name] = [
            FormatChoice(
                step,
                _bits(size, step),
                divergence * error / errors[0],
            )
            for step, error in zip(ladder, errors, strict=True)
        ]
        options[name].append(FormatChoice(None, _FLOAT_BITS * size, 0.0))
        if progress is not None:
            progress(number + 1, len(runner.forms), name)
    return options


def spend_bits(options: Mapping[str, Sequence[FormatChoice]], budget: float) -> FormatPlan:
    """Choose the formats with the least divergence within ``budget`` bits per weight.

    Raises:
        UsageError: the cheapest formats exceed the budget.
    """
    weights = sum(choice[-1].bits for choice in options.values()) / _FLOAT_BITS
    least = sum(choice[0].bits for choice in options.values()) / weights
    if least > budget:
        raise UsageError(
            f"a budget of {budget:g} bits cannot be met; the minimum is {least:.3f} bits per weight, "
            "including scales; larger blocks need fewer"
        )
    return _plan(options, _climb(options, bits=budget * weights))


def promote(
    runner: WeightInputs, share: float, first: Collection[str] = (), progress: Progress | None = None
) -> FormatPlan:
    """Choose 8 bits for known weights, then for the kinds of layers that lose most per additional bit.

    A kind is all weights whose names differ only in numbers, such as the value projections of all layers. So
    the text is run once per kind, and products that are merged in one layer are merged in all.

    Args:
        runner: measures divergences; weights with more than 4 bits stay as they are.
        share: additional bits, relative to the bits of all weights.
        first: weights that get 8 bits without a measurement, if all of them fit in the share.
        progress: called after every kind.
    """
    options: dict[str, list[FormatChoice]] = {}
    members: dict[str, list[str]] = {}
    # The share counts additional bits of all weights, but only those with 4 bits can change: what is fixed
    # is taken out of the budget.
    narrow = _total_bits(runner, runner.forms) + _FLOAT_BITS * sum(runner.float_sizes.values())
    narrowest = {name for name, form in runner.forms.items() if form.bits == _NARROW}
    known = {name: runner.wide(name) for name in first if name in narrowest}
    taken = _total_bits(runner, known) - _total_bits(runner, {name: runner.forms[name] for name in known})
    if taken > share * narrow:
        known, taken = {}, 0.0
    for name, form in runner.forms.items():
        if form.bits == _NARROW and name not in known:
            members.setdefault(layer_pattern(name), []).append(name)
    for number, (kind, names) in enumerate(members.items()):
        forms = {name: runner.forms[name] for name in names}
        wide = {name: runner.wide(name) for name in names}
        narrow_bits, wide_bits = (_total_bits(runner, each) for each in (forms, wide))
        options[kind] = [
            FormatChoice(forms[names[0]], narrow_bits, runner.divergence(forms)),
            FormatChoice(wide[names[0]], wide_bits, 0.0),
        ]
        if progress is not None:
            progress(number + 1, len(members), kind)
    fixed = narrow + taken - sum(steps[0].bits for steps in options.values())
    levels = _climb(options, bits=(1 + share) * narrow - fixed)
    chosen = {kind: steps[levels[kind]] for kind, steps in options.items()}
    weights = sum(runner.sizes.values()) + sum(runner.float_sizes.values())
    measured = {name: runner.wide(name) for kind in options if levels[kind] for name in members[kind]}
    return FormatPlan(
        {**known, **measured},
        (fixed + sum(choice.bits for choice in chosen.values())) / weights,
        sum(choice.divergence for choice in chosen.values()),
    )


def _total_bits(runner: WeightInputs, forms: Mapping[str, BlockFormat]) -> float:
    return sum(_bits(runner.sizes[name], form) for name, form in forms.items())


def _bits(size: int, form: BlockFormat) -> float:
    """Return the bits of a weight with its scales and zero points."""
    return form.bits * size + size / form.block_size * (_SCALE_BITS + (0 if form.symmetric else form.bits))


def spend_divergence(
    options: Mapping[str, Sequence[FormatChoice]],
    limit: float,
    measure: Callable[[Mapping[str, BlockFormat | None]], float],
) -> FormatPlan:
    """Choose the formats with the fewest bits whose measured divergence is at most ``limit`` nats.

    Raises:
        UsageError: the limit cannot be met.
    """
    aim, closest, best = limit, float("inf"), None
    for _ in range(_ATTEMPTS):
        plan = _plan(options, _climb(options, bits=float("inf"), divergence=aim))
        measured = measure({name: plan.overrides.get(name, steps[0].form) for name, steps in options.items()})
        closest = min(closest, measured)
        if measured <= limit and (best is None or plan.bits < best.bits):
            best = dataclasses.replace(plan, divergence=measured)
        if _ENOUGH * limit <= measured <= limit or (measured <= limit and not plan.overrides):
            break
        aim = plan.divergence * max(0.9 * limit / max(measured, 1e-30), 0.1)
    if best is None:
        raise UsageError(f"a divergence of {limit:g} cannot be met; the smallest found is {closest:.3g}")
    return best


def _climb(
    options: Mapping[str, Sequence[FormatChoice]], *, bits: float, divergence: float = 0.0
) -> dict[str, int]:
    """Apply the upgrades that fit in ``bits``, best gain first, until ``divergence`` is reached."""
    levels = dict.fromkeys(options, 0)
    used = sum(steps[0].bits for steps in options.values())
    expected = sum(steps[0].divergence for steps in options.values())
    for name, level in _upgrades(options):
        if expected <= divergence:
            break
        old, new = options[name][levels[name]], options[name][level]
        if level > levels[name] and used + new.bits - old.bits <= bits:
            used += new.bits - old.bits
            expected += new.divergence - old.divergence
            levels[name] = level
    return levels


def _upgrades(found: Mapping[str, Sequence[FormatChoice]]) -> list[tuple[str, int]]:
    """Return (weight, level) sorted by decreasing gain per bit over the previous level."""
    gains = {}
    for name, steps in found.items():
        for level in range(1, len(steps)):
            old, new = steps[level - 1], steps[level]
            gains[name, level] = (old.divergence - new.divergence) / max(new.bits - old.bits, 1e-30)
    return sorted(gains, key=lambda upgrade: -gains[upgrade])


def _plan(found: Mapping[str, Sequence[FormatChoice]], levels: Mapping[str, int]) -> FormatPlan:
    chosen = {name: steps[levels[name]] for name, steps in found.items()}
    weights = sum(steps[-1].bits for steps in found.values()) / _FLOAT_BITS
    return FormatPlan(
        {name: choice.form for name, choice in chosen.items() if levels[name]},
        sum(choice.bits for choice in chosen.values()) / weights,
        sum(choice.divergence for choice in chosen.values()),
    )
