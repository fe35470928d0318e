"""``carryall inspect`` and ``carryall families``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx_ir as ir
import pytest
from chat_styles import template
from click.testing import CliRunner
from tiny_encoders import write_case

from carryall.cli import carryall
from carryall.cli.verbs.inspect import show
from carryall.exporter.demo import demo_path
from carryall.exporter.encoders.names import encoder_families
from carryall.exporter.export import export_package, families
from carryall.providers import get_provider
from carryall.runtime.tasks.export import export

# Calls are tools of its prompt only.
CUT = "{{ tools or '' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_package(demo_path("pycoder"), tmp_path_factory.mktemp("inspect") / "package").path


def facts(model: str) -> dict[str, object]:
    result = CliRunner().invoke(carryall, ["inspect", model, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


def test_a_package_shows_its_contract_and_sizes(package: Path) -> None:
    found = facts(str(package))
    config = json.loads((package / "config.json").read_text())
    layers = config["num_hidden_layers"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    assert found["kv_cache"] == {
        "layers": layers,
        "kv_heads": config["num_key_value_heads"],
        "head_dim": head_dim,
        "heads_by_layer": [[config["num_key_value_heads"], head_dim]] * layers,
        "dtype": "FLOAT",
        "bytes_per_token": 2 * 4 * layers * config["num_key_value_heads"] * head_dim,
    }
    assert found["model_type"] == config["model_type"]
    assert found["quantization"] is None
    assert found["quantized_weights"] is False
    operators = found["operators"]
    assert isinstance(operators, dict)
    assert operators["Attention"] == layers
    assert found["nodes"] == sum(operators.values())
    files = found["files"]
    assert isinstance(files, dict)
    assert files["model.onnx.data"] == (package / "model.onnx.data").stat().st_size


def test_a_package_its_onnx_file_and_its_checkpoint_agree(package: Path) -> None:
    same = [*("nodes", "operators", "weights", "kv_cache", "inputs", "outputs", "parameters")]
    same += ["model_type", "context_length"]
    of_package, of_file, of_source = (facts(m) for m in (str(package), str(package / "model.onnx"), "demo"))
    for key in same:
        assert of_package[key] == of_file[key] == of_source[key], key
    assert of_source["files"]


def test_any_onnx_file_will_do(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
        net (float[batch, 3] x) => (float[batch, 3] y) { y = Relu(x) }"""
    ir.save(ir.from_onnx_text(text), tmp_path / "net.onnx")
    found = facts(str(tmp_path / "net.onnx"))
    assert found["operators"] == {"Relu": 1}
    assert found["kv_cache"] is None
    assert found["inputs"] == [{"name": "x", "dtype": "FLOAT", "shape": ["batch", 3]}]


def test_the_text_names_the_weights_of_all_layers_once(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = {"bits_a_weight": 5.5, "int8": ["layers.0.v_proj", "layers.1.v_proj", "lm_head"]}
    record = {"method": "int4", "mixed": mixed, "recipe": {"method": "int4"}}
    monkeypatch.setenv("COLUMNS", "120")
    show("model", {**facts(str(package)), "quantization": record})
    expected = "method int4, mixed (bits_a_weight 5.5, int8 2 x layers.N.v_proj + lm_head)"
    assert expected in capsys.readouterr().out


def test_weights_that_another_tool_quantized_are_reported(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        net (float[batch, 32] x) => (float[batch, 8] y)
        <uint8[8, 1, 16] w = {WEIGHTS}, float[8] s = {1,1,1,1,1,1,1,1}> {
            y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 4, block_size = 32> (x, w, s)
        }"""
    ir.save(ir.from_onnx_text(text.replace("WEIGHTS", ",".join(["136"] * 128))), tmp_path / "net.onnx")
    assert facts(str(tmp_path / "net.onnx"))["quantized_weights"] is True
    shown = CliRunner().invoke(carryall, ["inspect", str(tmp_path / "net.onnx")]).stdout
    assert "yes, without a record of the method" in shown


def test_the_head_size_of_onnxruntime_genai_is_read_from_its_configuration(tmp_path: Path) -> None:
    cache = "float[batch, 3, past, kv_cache_dim]"
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        net (int64[batch, n] input_ids, {cache} "past_key_values.0.key", {cache} "past_key_values.0.value")
            => (float[batch, n, 7] logits) {{
            shape = Shape (input_ids)  last = Constant <value_ints = [7]> ()
            sizes = Concat <axis = 0> (shape, last)  logits = ConstantOfShape (sizes)
        }}"""
    ir.save(ir.from_onnx_text(text), tmp_path / "model.onnx")
    model: dict[str, object] = {"type": "llama", "context_length": 64, "vocab_size": 7}
    decoder = {"filename": "model.onnx", "head_size": 16}
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {**model, "decoder": decoder}}))
    found = facts(str(tmp_path / "model.onnx"))["kv_cache"]
    assert isinstance(found, dict)
    assert (found["head_dim"], found["bytes_per_token"]) == (16, 2 * 4 * 3 * 16)


def test_the_text_names_what_matters(package: Path) -> None:
    result = CliRunner().invoke(carryall, ["inspect", str(package)], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    for words in (
        "KV cache",
        "largest weights",
        "Attention",
        "input_ids INT64 [batch, sequence]",
        "model.onnx.data",
    ):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("nowhere", 2, "nowhere"),
        ("text.onnx", 1, "text.onnx"),
        ("empty", 2, "empty"),
    ],
)
def test_bad_models_get_one_line(model: str, code: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("this is no model")
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(carryall, ["inspect", str(tmp_path / model)])
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_families_lists_what_can_be_exported() -> None:
    result = CliRunner().invoke(carryall, ["families", "--json"])
    entries = json.loads(result.stdout)
    known = [*families(), *encoder_families()]
    assert [entry["model_type"] for entry in entries] == known
    assert all(entry["about"] for entry in entries)
    text = CliRunner().invoke(carryall, ["families"]).stdout
    assert all(name in text for name in known)
    assert "stored [in, out]" in " ".join(text.split())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("bert", "without padding"),
        ("deberta-v2", "without padding"),
        ("deberta-v2-apart", "padded: Transpose deberta.encoder.conv.conv/Transpose may mix the tokens"),
    ],
)
def test_an_encoder_says_whether_its_texts_are_padded(tmp_path: Path, case: str, words: str) -> None:
    if not get_provider("cpu").lowers_texts():
        pytest.skip("needs carryall's CPU kernels")
    export(write_case(tmp_path / "source", case), tmp_path / "package")
    for model in (tmp_path / "package", tmp_path / "package/model.onnx"):
        assert str(facts(str(model))["texts"]).startswith(words)
    shown = CliRunner().invoke(carryall, ["inspect", str(tmp_path / "package")]).stdout
    assert words.split(":")[0] in shown


def test_what_a_chat_template_does_not_tell_is_named(tmp_path: Path) -> None:
    """The form of calls and thoughts is derived from the template; inspect shows it, or why it is not."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(demo_path("pycoder"), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    shown = {}
    for name, source in {"derived": template("tagged objects"), "cut": CUT}.items():
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": source}))
        shown[name] = facts(str(folder))["answers"]
    assert isinstance(shown["derived"], dict)
    assert '"NAME"' in shown["derived"]["call"]
    assert shown["derived"]["notes"] == []
    assert isinstance(shown["cut"], dict)
    assert any("leaves calls out of past answers" in note for note in shown["cut"]["notes"])
    result = CliRunner().invoke(carryall, ["inspect", str(folder)])
    assert "not derived" in result.stdout
    assert "leaves calls out of past answers" in " ".join(result.stdout.split())
