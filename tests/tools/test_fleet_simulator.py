"""The simulated clock: a service runs one step at a time, whatever arrives when one ends."""

from __future__ import annotations

import importlib.util
import itertools
import json
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


@pytest.mark.long
@pytest.mark.parametrize("streams", [1, 4])
def test_streams_that_return_at_once_do_not_double_a_service(simulator: ModuleType, streams: int) -> None:
    """No more tokens a second than all rows of every step allow."""
    options = SimpleNamespace(costs="10,1,0,0.1", streams=streams, prompt=2, answer=20, seconds=60.0)
    found = simulator.loop(options)
    most = streams / (0.010 + 0.001 * streams)
    assert 0.8 * most < found["tokens_s"] <= 1.01 * most  # a step more or less in the time
    assert found["between_ms_p95"] == pytest.approx(10 + streams, rel=0.05)


def test_fitted_costs_are_those_of_steps_that_vary(simulator: ModuleType) -> None:
    """Half of the steps take 0.7 and half 1.3 times their costs; steps with prompts vary less."""
    costs = simulator.Costs(0.01, 0.001, 0.004, 0.002, 1e-6)
    steps = [
        (rows, factor * costs.of(simulator.Facts.of(rows)))
        for streams in (1, 3, 6)
        for start in (20, 400)
        for prompts in ([], [(10, start)], [(30, 3 * start)], [(10, 0), (20, start)])
        for rows in [[(1, start)] * streams + prompts]
        for factor in ((0.9, 1.1) if prompts else (0.7, 1.3))
    ]
    fitted = simulator.Costs.fitted(steps)
    for name in ("step", "row", "prompt", "token", "key"):
        assert getattr(fitted, name) == pytest.approx(getattr(costs, name)), name
    plain, long = fitted.ratios
    assert sorted(plain) == pytest.approx([0.7] * 6 + [1.3] * 6)
    assert sorted(long) == pytest.approx([0.9] * 18 + [1.1] * 18)


def test_simulated_steps_vary_as_measured_ones(simulator: ModuleType) -> None:
    costs = simulator.Costs(0.01, 0.001, 0.0, 0.002, ratios=((0.9, 1.1), (1.0,)))
    ask = simulator.Ask(0.0, 5, 200)
    simulation = simulator.Simulation()
    simulation.give(simulator.Service(costs, 2), ask)
    simulation.run(60.0)
    assert ask.times[0] == pytest.approx(0.02)
    taken = {round(b - a, 4) for a, b in itertools.pairwise(ask.times)}
    assert taken == {0.0099, 0.0121}


def test_facts_of_rows_count_the_keys_that_each_token_attends_to(simulator: ModuleType) -> None:
    assert simulator.Facts.of([(1, 9), (3, 4)]) == (1, 1, 3, 10 + 5 + 6 + 7)


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "ratios"),
    [("one_service", [0.95, 1.02, 1.13]), ("one_service_short_prompts", [1.03, 1.06, 0.96, 0.88])],
)
def test_recorded_runs_of_a_real_model_are_predicted(
    simulator: ModuleType, capsys: pytest.CaptureFixture[str], run: str, ratios: list[float]
) -> None:
    assert simulator.check(PATH.parents[1] / "benchmarks" / "results" / f"{run}.json")
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [float(line.rpartition(" ")[2]) for line in lines] == pytest.approx(ratios, abs=0.02)


def test_the_recorded_run_of_prefill_and_decode_apart_is_predicted(
    simulator: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = PATH.parents[1] / "benchmarks" / "results" / "prefill_and_decode_apart.json"
    recorded = json.loads(results.read_text())["blocks"][0]["data"]
    run = tmp_path / "run.json"
    # Its streams began with 20 random words, which are 25 to 28 tokens.
    run.write_text(json.dumps({**recorded, "stream_prompt_tokens": 26}))
    assert simulator.check(run)
    lines = capsys.readouterr().out.splitlines()
    ratios = {line.partition(":")[0]: float(line.rpartition(" ")[2]) for line in lines}
    kinds = ("between_ms_p50", "between_ms_p99", "first_token_s_p50")
    assert {f"{name} {kind}" for name in ("together", "apart") for kind in kinds} <= ratios.keys()
    assert all(0.88 < ratio < 1.12 for ratio in ratios.values()), ratios
