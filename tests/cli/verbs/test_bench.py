"""``carryall bench``, ``carryall demo`` and ``carryall doctor``."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from carryall.cli import carryall
from carryall.cli.demo_steps import run_steps
from carryall.errors import ProviderRuntimeError
from carryall.runtime.engine.engine import Engine
from carryall.runtime.evaluate.throughput import Workload, WorkloadRun, measure


def run(*args: object) -> Result:
    return CliRunner().invoke(carryall, [str(arg) for arg in args], env={"COLUMNS": "100"})


@pytest.mark.long
def test_bench_reports_what_it_measured(tiny_package: Path) -> None:
    arguments = ("--batch", "1,3", "--prompt-tokens", 16, "--new-tokens", 8, "--repeats", 2)
    result = run("bench", tiny_package, *arguments, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert [entry["batch"] for entry in found["results"]] == [1, 3]
    for entry in found["results"]:
        for name in ("prefill_tokens_per_second", "decode_tokens_per_second", "time_to_first_token_ms"):
            assert 0 < entry[name]["min"] <= entry[name]["median"] <= entry[name]["max"]
        kv_bytes = round(entry["batch"] * (16 + 8 / 2) * found["kv_bytes_per_token"])
        assert entry["bytes_per_step"] == found["weight_bytes_per_step"] + kv_bytes
        assert entry["memory_bandwidth_share"] == pytest.approx(
            entry["decode_tokens_per_second"]["median"]
            / entry["batch"]
            * entry["bytes_per_step"]
            / (found["memory_bandwidth_gb_s"] * 1e9),
            rel=0.1,  # the bandwidth is rounded
        )
    assert found["memory_bandwidth_gb_s"] > 0.1
    if sys.platform != "win32":
        assert found["peak_memory_bytes"] > 10_000_000


@pytest.mark.long
def test_bench_in_words(tiny_package: Path) -> None:
    result = run("bench", tiny_package, "--batch", 1, "--prompt-tokens", 8, "--new-tokens", 4, "--repeats", 1)
    assert result.exit_code == 0, result.output
    for words in ("prefill tokens/s", "decode tokens/s", "of bandwidth", "memory bandwidth"):
        assert words in result.stdout


@pytest.mark.long
def test_bench_measures_the_batches_of_the_readme_on_the_demo() -> None:
    """The first request must not end before the prefill of the last has begun."""
    result = run("bench", "demo", "--batch", "1,8", "--repeats", 1, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(entry["batch"], entry["prompt_tokens"]) for entry in found["results"]] == [(1, 256), (8, 256)]


@pytest.mark.long
def test_the_results_of_earlier_batches_are_kept_when_a_later_one_fails(
    tiny_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(engine: Engine, work: Workload, seed: int) -> WorkloadRun:
        if work.batch == 3:
            raise ProviderRuntimeError("the device fell over")
        return measure(engine, work, seed)

    monkeypatch.setattr("carryall.runtime.tasks.benchmark.measure", failing)
    arguments = ("--batch", "1,3", "--prompt-tokens", 16, "--new-tokens", 8, "--repeats", 1, "--json")
    result = run("bench", tiny_package, *arguments)
    assert result.exit_code == 1
    assert [entry["batch"] for entry in json.loads(result.stdout)["results"]] == [1]
    assert result.stderr == "error: the device fell over\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch", "1,x"], "'1,x' is not a list of batch sizes"),
        (["--batch", "0"], "'0' is not a list of batch sizes"),
        (["--prompt-tokens", "120", "--new-tokens", "64"], "exceed the context of 128"),
        (["--new-tokens", "1"], "--new-tokens"),
        (["--prompt-tokens", str(10**14)], "exceed the context of 128"),
        (["--batch", "10000000"], "max_slots 10000000 x (64 tokens x "),
        (["--num-threads", "5000"], "num_threads is 5000; at most"),
        (["--num-threads", str(10**21)], "num_threads is 1000000000000000000000; at most"),
    ],
)
def test_bench_refuses_what_does_not_fit(options: list[str], words: str, tiny_package: Path) -> None:
    result = run("bench", tiny_package, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.long
def test_the_demo_ends_in_one_json_object() -> None:
    result = run("demo", "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["tokens"] > 10
    assert found["tokens_per_second"] > 0
    assert found["text"].strip()
    assert 0 < found["nodes_after"] < found["nodes_before"]
    assert found["weight_bytes_after"] < found["weight_bytes_before"] / 5
    assert (
        found["operators_before"]["Attention"]
        == found["operators_after"]["com.microsoft::GroupQueryAttention"]
    )
    assert [*found["form"]["read"]] == [*found["form"]["written"]]


@pytest.mark.long
def test_the_demo_shows_its_steps_and_its_text() -> None:
    result = run("demo", "--prompt", "import os\n")
    assert result.exit_code == 0, result.output
    for words in ("export", "quantize", "optimize", "before:", "after:", "GroupQueryAttention", "tokens/s"):
        assert words in result.stdout
    assert "import os\n" in result.stdout
    assert "\u28ff" >= max(result.stdout.split("a form, and what is read of it")[1]) > "\u2800"
    assert re.search("^date: [0-9-]{10}$", result.stdout, re.MULTILINE)


@pytest.mark.long
def test_the_demo_without_pillow_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("demo", "--prompt", "import os\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("Pictures need Pillow: pip install 'carryall[images]'\n")


@pytest.mark.long
def test_every_step_of_the_demo_is_a_package(tmp_path: Path) -> None:
    steps = run_steps(tmp_path, quiet=True)
    assert [step.name for step in steps] == ["export", "quantize", "optimize"]
    assert all(CliRunner().invoke(carryall, ["inspect", str(step.package)]).exit_code == 0 for step in steps)


@pytest.mark.parametrize("option", ["--device", "--provider"])
def test_doctor_takes_no_provider_without_a_selftest(option: str) -> None:
    result = run("doctor", option, "cpu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{option} needs --selftest" in result.stderr


@pytest.mark.long
@pytest.mark.usefixtures("without_kernels")
def test_doctor_says_what_works() -> None:
    result = run("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert {report["name"]: report["works"] for report in found["providers"]}["cpu"] is True
    assert "doctor --build-kernels" in found["kernels"]["missing"]
    text = run("doctor")
    assert text.exit_code == 0
    for words in ("processor", "memory", "cpu", "works", "onnxruntime"):
        assert words in text.stdout
