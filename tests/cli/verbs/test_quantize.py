"""``carryall quantize``."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from click.testing import CliRunner, Result
from tiny_models import write_tiny

from carryall import LLM, SamplingParams
from carryall.cli import carryall
from carryall.exporter.demo import CALIBRATION_TEXT, demo_path
from carryall.exporter.package import Package
from carryall.graph_opt.quantize.methods import METHODS
from carryall.graph_opt.quantize.recipe import QuantizationRecipe
from carryall.graph_opt.quantize.search.outliers import sensitive_weights
from carryall.graph_opt.quantize.weight_methods import WeightOnlyMethod
from carryall.options import declared
from carryall.providers.native.library import find_library
from carryall.runtime.models.loading import load_model


def run(*args: object) -> Result:
    return CliRunner().invoke(carryall, [str(arg) for arg in args], env={"COLUMNS": "110"})


@pytest.fixture(scope="module")
def kv_package(tiny_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny package with a quantized cache and float weights."""
    out = tmp_path_factory.mktemp("kv") / "package"
    result = run("quantize", tiny_package, out, "--method", "none", "--kv", "int8")
    assert result.exit_code == 0, result.output
    assert "KV cache of 2 layers to int8" in result.stdout
    return out


def test_the_record_says_what_was_done(kv_package: Path, tmp_path: Path) -> None:
    recipe = {"method": "none", "kv": "int8"}
    assert Package.open(kv_package).record.quantization == {"kv_cache": "int8", "recipe": recipe}
    out = tmp_path / "both"
    result = run("quantize", kv_package, out, "--method", "int4-fast", "--block-size", 16, "--json")
    facts = json.loads(result.stdout)
    assert facts["weights"] == 16
    assert facts["quantization"] == Package.open(out).record.quantization
    assert facts["quantization"] == {
        "method": "int4-fast",
        "bits": 4,
        "block_size": 16,
        "symmetric": False,
        "group_size": 64,
        "algorithm": "kquant",
        "embedding_bits": 8,
        "mixed": {"int8": "keys, values and outlying feed-forward layers"},
        "kv_cache": "int8",
        "recipe": {"method": "int4-fast", "block_size": 16},
    }


@pytest.mark.long
def test_a_model_with_scales_keeps_int8_unless_asked_otherwise(tiny_package: Path, kv_package: Path) -> None:
    if find_library() is None:
        pytest.skip("the CPU kernels are not built")

    def bytes_per_token(model: Path, kv_cache: str | None = None) -> int:
        loaded = load_model(model, max_slots=2, kv_cache_dtype=kv_cache)
        with LLM(loaded) as llm:
            assert (
                len(
                    llm.generate("abc", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0]
                    .outputs[0]
                    .token_ids
                )
                == 4
            )
        return loaded.runner.info.kv_bytes_per_token

    exact = bytes_per_token(tiny_package)
    assert bytes_per_token(kv_package) == bytes_per_token(kv_package, "int8") < exact // 2
    assert bytes_per_token(kv_package, "float32") == exact


def test_calibration_text_of_the_users_own(tiny_package: Path, tmp_path: Path) -> None:
    text = tmp_path / "prompts.jsonl"
    text.write_text("".join(json.dumps({"prompt": "some words " * 30}) + "\n" for _ in range(3)))
    arguments = ("quantize", tiny_package, tmp_path / "out", "--kv", "int8", "--block-size", 16)
    assert run(*arguments, "--calibration", text).exit_code == 0
    text.write_text('"short"')
    result = run(*arguments[:2], tmp_path / "other", *arguments[3:], "--calibration", text)
    assert result.exit_code == 2
    assert "the calibration text has 5 tokens; at least 128 are needed" in result.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "none"), "the recipe does nothing"),
        (("--method", "none", "--kv", "int8"), "the KV cache of .* is already quantized"),
        (
            ("--max-error", "0.1"),
            "max_error has no effect with method int4; it is for: int8-",
        ),
        (("--budget", "many"), "a number of bits, more than 0 and at most 32, or None, not 'many'"),
        (
            ("--budget", "5", "--method", "int8-dynamic"),
            "budget has no effect with method int8-dyn",
        ),
        (("--budget", "5", "--max-kl", "0.1"), "exclude each other; choose one"),
        (("--method", "int4-fast", "--calibration", __file__), "calibration has no effect here"),
    ],
)
def test_wrong_use_is_refused(
    kv_package: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    result = run("quantize", kv_package, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert re.search(message, result.stderr)


@pytest.mark.long
def test_gptq_with_zero_points_and_an_embedding_in_int8(tiny_package: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--method", "int4-fast", "--block-size", 16, "--algorithm", "gptq", "--kv", "int8")
    result = run("quantize", tiny_package, out, *options)
    assert result.exit_code == 0, result.output
    package = Package.open(out)
    assert package.record.quantization == {
        "method": "int4-fast",
        "bits": 4,
        "block_size": 16,
        "symmetric": False,
        "group_size": 64,
        "algorithm": "gptq",
        "embedding_bits": 8,
        "mixed": {"int8": "keys, values and outlying feed-forward layers"},
        "kv_cache": "int8",
        "recipe": {"method": "int4-fast", "block_size": 16, "algorithm": "gptq", "kv": "int8"},
    }
    types = {name: value.dtype for name, value in package.load().graph.initializers.items()}
    assert types["model.embed_tokens.weight.values"] == ir.DataType.INT8
    assert types["model.layers.0.self_attn.k_proj.weight.values"] == ir.DataType.INT8
    assert types["model.layers.0.self_attn.q_proj.weight.values"] == ir.DataType.UINT4
    plain = tmp_path / "plain"
    symmetric = (
        "--method",
        "int4-fast",
        "--block-size",
        16,
        "--algorithm",
        "rtn",
        "--symmetric",
        "--embedding",
        "int4",
    )
    assert run("quantize", tiny_package, plain, *symmetric).exit_code == 0
    text = tmp_path / "text.txt"
    text.write_text(CALIBRATION_TEXT.read_text()[20000:21000])
    divergence = [
        json.loads(run("eval", path, "--text", text, "--reference", tiny_package, "--json").stdout)["mean_kl"]
        for path in (out, plain)
    ]
    assert divergence[0] < 0.8 * divergence[1]


@pytest.mark.parametrize(("family", "done"), [("llama", True), ("gpt2", False)])
def test_the_record_says_if_the_rotation_was_refused(family: str, done: bool, tmp_path: Path) -> None:
    write_tiny(family, tmp_path / "checkpoint")
    method = ("--method", "int4-fast", "--block-size", 16, "--rotate")
    result = run("quantize", tmp_path / "checkpoint", tmp_path / "out", *method)
    assert result.exit_code == 0, result.output
    record = Package.open(tmp_path / "out").record.quantization
    assert record is not None
    assert record["rotate"] is done
    assert record["recipe"]["rotate"] is True


@pytest.mark.long
def test_the_default_widens_sensitive_weights_and_the_kinds_that_lose_most(
    tiny_package: Path, tmp_path: Path
) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text(CALIBRATION_TEXT.read_text()[20000:30000])
    known = {str(value.name) for value in sensitive_weights(Package.open(tiny_package).load().graph)}
    result = run("quantize", tiny_package, out, "--calibration", text, "--promote", 0.25)
    assert result.exit_code == 0, result.output
    package = Package.open(out)
    assert package.record.quantization is not None
    assert not package.record.quantization.keys() & {"rotate", "smooth"}
    wide = set(package.record.quantization["mixed"]["int8"])
    weights = package.load().graph.initializers
    projections = [name.removesuffix(".values") for name in weights if name.endswith("_proj.weight.values")]
    expected = {name: ir.DataType.INT8 if name in wide else ir.DataType.UINT4 for name in projections}
    assert {name: weights[f"{name}.values"].dtype for name in projections} == expected
    assert known < wide < set(projections)
    kinds = {name.replace(".0.", ".N.").replace(".1.", ".N.") for name in wide - known}
    assert len(wide - known) == 2 * len(kinds)  # all layers of a kind


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["hqq", "kquant", "awq", "awq+gptq"])
def test_algorithms_are_recorded_and_run(tiny_package: Path, tmp_path: Path, algorithm: str) -> None:
    out = tmp_path / "out"
    options = ("--method", "int4-fast", "--block-size", 16, "--algorithm", algorithm)
    result = run("quantize", tiny_package, out, *options)
    assert result.exit_code == 0, result.output
    record = Package.open(out).record
    assert record.quantization is not None
    assert record.quantization["algorithm"] == algorithm
    assert (record.quantization["symmetric"], record.quantization["embedding_bits"]) == (False, 8)
    assert ("SmoothQuant" in record.passes) == algorithm.startswith("awq")
    assert run("run", out, "abc", "--max-tokens", 3).exit_code == 0


@pytest.mark.long
def test_budgets_are_kept_and_recorded(tiny_package: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(CALIBRATION_TEXT.read_text()[:1500])
    size = ("--block-size", 16, "--symmetric", "--embedding", "int4")
    options = ("quantize", tiny_package, tmp_path / "out", *size, "--calibration", text)
    result = run(*options, "--budget", "7bits", "--json")
    assert result.exit_code == 0, result.output
    mixed = json.loads(result.stdout)["quantization"]["mixed"]
    assert 6 < mixed["bits_a_weight"] <= 7
    graph = Package.open(tmp_path / "out").load().graph
    for name in mixed["int8"]:
        assert graph.initializers[f"{name}.values"].dtype == ir.DataType.INT8
    refused = run(*options[:2], tmp_path / "no", *options[3:], "--budget", "4.5bits")
    assert refused.exit_code == 2
    assert "the minimum is 5.000 bits per weight" in refused.stderr
    limited = run(*options[:2], tmp_path / "kl", *options[3:], "--max-kl", "0.0005", "--algorithm", "gptq")
    assert limited.exit_code == 0, limited.output
    record = Package.open(tmp_path / "kl").record.quantization
    assert record is not None
    assert record["mixed"]["divergence"] <= 0.0005


def test_dynamic_int8_runs(tiny_package: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("quantize", tiny_package, out, "--method", "int8-dynamic", "--block-size", 16).exit_code == 0
    assert run("run", out, "abc", "--max-tokens", 3).exit_code == 0
    again = run("quantize", out, tmp_path / "again")
    assert again.exit_code == 2
    assert "is already quantized" in again.stderr
    refused = run(
        "quantize", tiny_package, tmp_path / "no", "--method", "int8-dynamic", "--algorithm", "gptq"
    )
    assert "algorithm has no effect with method int8-dynamic" in refused.stderr


def test_layers_with_outliers_keep_float_activations(tiny_package: Path, tmp_path: Path) -> None:
    options = ("quantize", tiny_package, tmp_path / "vetoed", "--method", "int8-dynamic", "--block-size", 16)
    result = run(*options, "--max-error", 0.0, "--json")
    record = json.loads(result.stdout)["quantization"]
    assert len(record["weight_only"]) == 15
    assert "MatMulInteger" not in {node.op_type for node in Package.open(tmp_path / "vetoed").load().graph}


def test_smoothing_is_recorded(tiny_package: Path, tmp_path: Path) -> None:
    options = ("quantize", tiny_package, tmp_path / "out", "--method", "int8-dynamic", "--block-size", 16)
    assert run(*options, "--smooth").exit_code == 0
    record = Package.open(tmp_path / "out").record
    assert record.quantization is not None
    assert record.quantization["smooth"] is True
    assert record.passes[-2:] == ("SmoothQuant", "DynamicQuantization")


def test_the_embedding_may_stay_float(tiny_package: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--method", "int8-fast", "--block-size", 16, "--embedding", "float")
    assert run("quantize", tiny_package, out, *options).exit_code == 0
    types = {name: value.dtype for name, value in Package.open(out).load().graph.initializers.items()}
    assert types["model.embed_tokens.weight"] == ir.DataType.FLOAT
    assert types["model.layers.0.mlp.down_proj.weight.values"] == ir.DataType.INT8


@pytest.mark.long
@pytest.mark.parametrize("first", ["int4", "int8", "int8-dynamic", "int8-static", "fp16", "bf16"])
def test_nothing_is_quantized_twice(tiny_package: Path, tmp_path: Path, first: str) -> None:
    once = tmp_path / "once"
    blocks = ("--block-size", 16) if first == "int4" else ()
    assert run("quantize", tiny_package, once, "--method", first, *blocks).exit_code == 0
    for second in ("int4", "int8-static", "fp16"):
        result = run("quantize", once, tmp_path / "twice", "--method", second)
        assert result.exit_code == 2
        assert re.search(
            r"(is already quantized|already has 16-bit weights); start from the float model", result.stderr
        )
        assert not (tmp_path / "twice").exists()


@pytest.mark.long
def test_fewer_tokens_are_read_if_asked_for(tiny_package: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words " * 800)
    text.with_suffix(".short").write_text("some words " * 800 + "\x00" * 999)
    outs = []
    for path in (text, text.with_suffix(".short")):  # they differ after the part that is read
        outs.append(tmp_path / path.suffix)
        options = ("--algorithm", "gptq", "--block-size", 16, "--calibration", path)
        assert run("quantize", tiny_package, outs[-1], *options, "--calibration-tokens", 600).exit_code == 0
    one, other = ((out / "model.onnx.data").read_bytes() for out in outs)
    assert one == other
    result = run(
        "quantize", tiny_package, tmp_path / "no", "--method", "int4-fast", "--calibration-tokens", 600
    )
    assert "calibration has no effect here" in " ".join(result.stderr.split())


@pytest.mark.parametrize("method", ["int4", "int4-fast", "int8", "int8-fast"])
def test_the_help_states_the_defaults_of_the_method(method: str) -> None:
    made = METHODS[method]
    assert isinstance(made, WeightOnlyMethod)
    yes_or_no = "yes" if made.outliers else "no"
    assert stated_default("algorithm", method) == made.algorithm
    assert stated_default("symmetric", method) == ("symmetric" if made.symmetric else "asymmetric")
    assert stated_default("rotate", method) == stated_default("smooth", method) == yes_or_no


def stated_default(setting: str, method: str) -> str:
    """The default in a help such as ``[default: int4, int8 yes; others no]``."""
    _, _, defaults = declared(QuantizationRecipe)[setting].help.rstrip("]").partition("[default: ")
    found: dict[str, str] = {}
    for clause in defaults.split("; "):
        *names, value = clause.replace(",", "").split()
        found |= dict.fromkeys(names, value)
    return found.get(method, found.get("others", ""))


_OLD = """<ir_version: 8, opset_import: ["" : 18]>
old (int64[batch, n] input_ids) => (float[batch, n, 64] logits) {
    hidden = Gather (table, input_ids)
    logits = MatMul (hidden, head)
}"""


def save_old_model(file: Path) -> None:
    model, rng = onnx.parser.parse_model(_OLD), np.random.default_rng(0)
    for name in ("table", "head"):
        weight = rng.normal(size=(64, 64)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    onnx.save(model, file)


@pytest.mark.parametrize("method", ["int4-fast", "int8-fast", "int8-dynamic"])
def test_a_graph_of_an_older_opset(method: str, tmp_path: Path) -> None:
    """Optimum writes opset 18, whose DequantizeLinear has no blocks."""
    save_old_model(tmp_path / "old.onnx")
    result = run("quantize", tmp_path / "old.onnx", tmp_path / "new.onnx", "--method", method)
    assert result.exit_code == 0, result.output
    onnx.checker.check_model(tmp_path / "new.onnx", full_check=True)
    feeds = {"input_ids": np.arange(9)[None]}
    sessions = [ort.InferenceSession(tmp_path / f"{name}.onnx") for name in ("old", "new")]
    before, after = (session.run(None, feeds)[0] for session in sessions)
    assert 0 < np.abs(after - before).mean() < 0.1 * np.abs(before).mean()


def test_a_cache_that_cannot_be_quantized_is_named(tmp_path: Path) -> None:
    file = shutil.copytree(demo_path(), tmp_path / "traced") / "model.onnx"
    save_old_model(file)
    result = run("quantize", file, tmp_path / "out.onnx", "--method", "none", "--kv", "int8")
    assert result.exit_code == 2
    assert "carryall optimize" in result.stderr
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("options", [(), ("--method", "fp16"), ("--method", "none", "--kv", "int8")])
def test_without_a_tokenizer_the_error_names_what_needs_none(
    options: tuple[str, ...], tiny_package: Path, tmp_path: Path
) -> None:
    for name in ("model.onnx", "model.onnx.data", "config.json"):
        shutil.copy(tiny_package / name, tmp_path / name)
    result = run("quantize", tmp_path, tmp_path / "out.onnx", *options)
    assert result.exit_code == 2
    assert f"{tmp_path} has no tokenizer.json" in result.stderr
    assert "use one of the methods int4-fast, int8-fast, int8-dynamic and bf16" in result.stderr
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("method", ["int4-fast", "int8-fast", "int8-dynamic", "bf16"])
def test_methods_that_read_no_text_need_no_tokenizer(method: str, tiny_package: Path, tmp_path: Path) -> None:
    for name in ("model.onnx", "model.onnx.data"):
        shutil.copy(tiny_package / name, tmp_path / name)
    assert run("quantize", tmp_path, tmp_path / "out.onnx", "--method", method).exit_code == 0


@pytest.mark.long
def test_without_a_context_length_the_error_names_the_key(tiny_package: Path, tmp_path: Path) -> None:
    for name in ("model.onnx.data", "tokenizer.json"):
        shutil.copy(tiny_package / name, tmp_path / name)
    graph = onnx.load(tiny_package / "model.onnx", load_external_data=False)
    del graph.metadata_props[:]
    (tmp_path / "model.onnx").write_bytes(graph.SerializeToString())
    result = run("quantize", tmp_path, tmp_path / "out.onnx")
    assert result.exit_code == 2
    assert f"add a config.json with max_position_embeddings to {tmp_path}" in result.stderr
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    assert run("quantize", tmp_path, tmp_path / "out.onnx").exit_code == 0
