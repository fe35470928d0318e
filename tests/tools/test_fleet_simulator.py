"""The simulated clock: a service runs one step at a time, whatever arrives when one ends."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

PATH = Path(__file__).resolve().parents[2] / "tools" / "fleet_simulator.py"


@pytest.fixture(scope="module")
def simulator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fleet_simulator", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_request_takes_what_its_steps_cost(simulator: ModuleType) -> None:
    simulation, service = (
        simulator.Simulation(),
        simulator.Service(simulator.Costs(0.01, 0.002, 0.0, 0.001), 2),
    )
    ask = simulator.Ask(0.0, 100, 5)
    simulation.give(service, ask)
    simulation.run(10.0)
    assert ask.times == pytest.approx([0.11, 0.122, 0.134, 0.146, 0.158])


@pytest.mark.parametrize("streams", [1, 4])
def test_streams_that_return_at_once_do_not_double_a_service(simulator: ModuleType, streams: int) -> None:
    """No more tokens a second than all rows of every step allow."""
    options = SimpleNamespace(costs="10,1,0,0.1", streams=streams, prompt=2, answer=20, seconds=60.0)
    found = simulator.loop(options)
    most = streams / (0.010 + 0.001 * streams)
    assert 0.8 * most < found["tokens_s"] <= 1.01 * most  # a step more or less in the time
    assert found["between_ms_p95"] == pytest.approx(10 + streams, rel=0.05)


def test_costs_of_steps_that_vary_keep_their_ratios(simulator: ModuleType) -> None:
    steps = [
        (rows, prompts, 10 * prompts, factor * (0.01 + 0.001 * rows + 0.002 * 10 * prompts))
        for rows in (1, 3, 6)
        for prompts in (0, 1)
        for factor in (0.9, 1.1)
    ]
    costs = simulator.Costs.fitted(steps)
    assert costs.step == pytest.approx(0.01, rel=0.02)
    assert costs.of(3, 1, 10) == pytest.approx(0.033, rel=0.02)
    assert sorted(costs.ratios) == pytest.approx([0.9] * 6 + [1.1] * 6, rel=0.03)
    service = simulator.Service(costs, 2)
    ask = simulator.Ask(0.0, 1, 200)
    simulation = simulator.Simulation()
    simulation.give(service, ask)
    simulation.run(60.0)
    taken = {round(b - a, 4) for a, b in zip(ask.times, ask.times[1:], strict=False)}
    assert max(taken) / min(taken) == pytest.approx(1.1 / 0.9, rel=0.02)


@pytest.mark.parametrize(
    ("run", "ratios"),
    [("one_service", [0.97, 0.97, 0.92]), ("one_service_short_prompts", [1.02, 1.07, 0.86])],
)
def test_recorded_runs_of_a_real_model_are_predicted(
    simulator: ModuleType, capsys: pytest.CaptureFixture[str], run: str, ratios: list[float]
) -> None:
    assert simulator.check(PATH.parents[1] / "benchmarks" / "results" / f"{run}.json")
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [float(line.rpartition(" ")[2]) for line in lines] == pytest.approx(ratios, abs=0.02)
