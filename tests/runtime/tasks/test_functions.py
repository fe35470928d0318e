"""The functions of ``carryall``: typed reports, progress, errors, and no partial files."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny
from tiny_vlms import write_vlm
from tiny_whisper import write_whisper

import carryall
from carryall.errors import CarryallError, CheckpointError, UsageError, VerificationError
from carryall.exporter.demo import CALIBRATION_TEXT
from carryall.exporter.package import Package
from carryall.graph_opt.compare.bars import Bars
from carryall.reports import Report
from carryall.runtime.tasks import report_file
from carryall.runtime.types.outputs import CompletionOutput, RequestOutput


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared models go into a folder of this test run."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    write_tiny("llama", folder / "checkpoint")
    return carryall.export(folder / "checkpoint", folder / "package").path


class Phases:
    """Records the progress calls."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[int, int]] = {}

    def __call__(self, done: int, total: int, name: str, /) -> None:
        assert 0 <= done <= total
        self.seen[name] = (done, total)


def check(report: Report) -> dict[str, Any]:
    """Check what every report can do; return its facts."""
    ET.fromstring(report._repr_html_())  # noqa: S314 -- ours, and what notebooks call
    assert str(report)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(report, dataclasses.fields(report)[0].name, "other")  # type: ignore[arg-type]
    found = json.loads(report.to_json())
    assert isinstance(found, dict)
    return found


@pytest.mark.long
def test_a_model_goes_all_the_way_through_the_functions(package: Path, tmp_path: Path) -> None:
    phases = Phases()
    recipe = carryall.QuantizationRecipe("int8-fast", block_size=16, embedding="float")
    quantized = carryall.quantize(package, tmp_path / "int8", recipe, progress=phases)
    facts = check(quantized)
    assert phases.seen["quantize"][0] == phases.seen["quantize"][1] > 0
    assert facts["left_float"]["weights"] == 1
    record = Package.open(tmp_path / "int8").record.quantization
    assert record is not None
    assert carryall.QuantizationRecipe.from_dict(record["recipe"]) == recipe == quantized.recipe
    text = CALIBRATION_TEXT.read_text()[:1500]
    judged = carryall.evaluate(tmp_path / "int8", text, reference=package, prompts=2, progress=phases)
    assert check(judged)["mean_kl"] == judged.prediction.mean_kl
    assert judged.perplexity_ratio == pytest.approx(1, abs=0.1)
    assert phases.seen["eval"][0] == phases.seen["eval"][1]
    differences = carryall.diff(package, tmp_path / "int8")
    assert check(differences)["same"] is differences.same is False
    assert carryall.diff(package, package).same
    lowered = carryall.optimize(package, tmp_path / "cpu", target="cpu", verify=True)
    assert check(lowered)["after"]["com.microsoft::GroupQueryAttention"] == 2
    assert lowered.verification is not None
    exact = carryall.verify(package, tmp_path / "cpu")
    assert check(exact)["passed"] is exact.passed is True
    wide = carryall.verify(package, tmp_path / "int8", bars=Bars(max_kl=1e-12))
    assert not wide.passed
    with pytest.raises(VerificationError, match="int8 differs from"):
        wide.check()
    measured = carryall.benchmark(package, batch=[1, 3], prompt_tokens=8, new_tokens=4, repeats=1)
    assert [one["batch"] for one in check(measured)["results"]] == [1, 3]


def test_a_file_of_tensors_or_the_tensors_themselves(package: Path) -> None:
    tokens = {"input_ids": np.array([[5, 6, 7]], np.int64)}
    assert carryall.verify(package, package, inputs=tokens, steps=2).found.max_abs == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "int3"}, "method must be one of int4, .*, not 'int3'"),
        ({"block_size": 48}, "block_size must be one of 16, .*, not 48"),
        (
            {"budget": float("nan")},
            "budget must be a number of bits, more than 0 and at most 32",
        ),
        ({"budget": -1.0}, "budget must be"),
        ({"max_kl": 0.0}, "max_kl must be a number of more than 0 and at most 1e.06, or None, not 0.0"),
        ({"max_kl": float("inf")}, "max_kl must be"),
        ({"calibration_tokens": 10**12, "kv": "int8"}, "calibration_tokens must be"),
        ({"method": "fp16", "algorithm": "gptq"}, "algorithm has no effect with method fp16"),
        ({"smooth": "yes", "method": "int8-dynamic"}, "smooth must be true or false"),
        ({"budget": 5.0, "max_kl": 0.1}, "exclude each other; choose one"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        carryall.QuantizationRecipe(**wrong)


def test_a_recipe_survives_json() -> None:
    recipe = carryall.QuantizationRecipe(
        "int4",
        algorithm="gptq",
        kv="int8-tensor",
        budget=4.5,
        calibration=Path("text.txt"),  # type: ignore[arg-type]
    )
    assert carryall.QuantizationRecipe.from_json(recipe.to_json()) == recipe
    for text, message in (
        ("{", "not JSON"),
        ("[]", "object"),
        ('{"bits": 4}', "unknown recipe setting 'bits'"),
    ):
        with pytest.raises(UsageError, match=message):
            carryall.QuantizationRecipe.from_json(text)


@pytest.mark.long
def test_the_layers_of_a_calibration_stay_until_the_model_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that fails keeps them for the next one, which deletes them at its end."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    write_tiny("llama", tmp_path / "source")
    carryall.export(tmp_path / "source", tmp_path / "float")
    recipe = carryall.QuantizationRecipe("int4", calibration_tokens=512)

    def stop(done: int, total: int, what: str) -> None:
        if what == "quantize":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carryall.quantize(tmp_path / "float", tmp_path / "out", recipe, progress=stop)
    assert list((tmp_path / "cache" / "layers").glob("[!.]*"))
    assert not (tmp_path / "out").exists()
    carryall.quantize(tmp_path / "float", tmp_path / "out", recipe)
    assert not list((tmp_path / "cache" / "layers").glob("[!.]*"))


def test_a_budget_counts_all_weights(tmp_path: Path) -> None:
    """Float weights count 32 bits each; scales and zero points count their size in the file."""
    write_tiny("llama", tmp_path / "source", intermediate_size=40)
    carryall.export(tmp_path / "source", tmp_path / "float")
    text = tmp_path / "text.txt"
    text.write_text(CALIBRATION_TEXT.read_text()[:1000])
    recipe = carryall.QuantizationRecipe(
        "int4-fast", 16, embedding="int4", budget=9.0, calibration=str(text), symmetric=True
    )
    found = carryall.quantize(tmp_path / "float", tmp_path / "out", recipe)
    graph = Package.open(tmp_path / "float").load().graph
    count = sum(
        one.const_value.size
        for one in graph.initializers.values()
        if one.const_value is not None and len(one.const_value.shape) == 2
    )
    stored = [
        one.const_value.nbytes
        for one in ir.load(Package.open(tmp_path / "out").model_path).graph.initializers.values()
        if one.const_value is not None and len(one.const_value.shape) == 2
    ]
    assert found.left_float.weights == 2
    bits = 8 * sum(stored) / count
    assert found.quantization["mixed"]["bits_a_weight"] == pytest.approx(bits, rel=1e-3)
    assert 8 < bits <= 9


@pytest.mark.long
@pytest.mark.parametrize("verb", ["optimize", "quantize"])
def test_a_report_that_cannot_be_written_is_told_exactly(
    verb: str, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report_file, "to_html", full)
    out, report = tmp_path / "out", tmp_path / "report.html"
    if verb == "optimize":
        with pytest.raises(OSError, match="No space left"):
            carryall.optimize(package, out, report=report)
        assert not out.exists()
    else:
        monkeypatch.setattr("carryall.runtime.tasks.quantize.measure_cost", lambda *_: {})
        monkeypatch.setattr("carryall.runtime.tasks.quantize.summary", lambda _: "")
        with pytest.raises(CarryallError, match=r"out was written, but its report .*report.html was not"):
            carryall.quantize(package, out, report=report)
        assert Package.open(out)
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if verb == "quantize" else [])


def test_outputs_are_tables_in_a_notebook() -> None:
    found = RequestOutput("r1", "a <b>", [1, 2], [CompletionOutput(0, "x & y", [3], finish_reason="stop")])
    table = ET.fromstring(found._repr_html_())  # noqa: S314 -- what notebooks call
    texts = ["".join(cell.itertext()) for row in table.iter("tr") for cell in row]
    assert texts == ["prompt", "a <b>", "stop, 1 tokens", "x & y"]


def test_a_broken_tokenizer_is_refused_before_any_work(tmp_path: Path) -> None:
    source = write_tiny("llama", tmp_path / "checkpoint")
    (source / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizers .* cannot read .*tokenizer\.json"):
        carryall.export(source, tmp_path / "package")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.long
@pytest.mark.parametrize("write", [write_vlm, write_whisper])
def test_a_checkpoint_keeps_its_eyes_and_ears(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Both commands left it out, and a package that answers text alone was the result."""
    checkpoint = write(tmp_path / "checkpoint")
    exported = carryall.export(checkpoint, tmp_path / "exported").path
    carryall.quantize(checkpoint, tmp_path / "quantized", "int8-fast")
    carryall.optimize(checkpoint, tmp_path / "optimized")
    names = {path.name for path in exported.iterdir()}
    towers = [name for name in names if name.startswith(("vision.", "audio."))]
    assert towers
    for name in ("quantized", "optimized"):
        assert {path.name for path in (tmp_path / name).iterdir()} == names
        for tower in towers:
            assert (tmp_path / name / tower).read_bytes() == (exported / tower).read_bytes()
