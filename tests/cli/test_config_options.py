"""Every field of ModelConfig and EngineConfig is a flag, an environment variable and a key of a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from carryall import EngineConfig, ModelConfig
from carryall.cli import carryall
from carryall.cli.load_options import SERVER_TABLES, TABLES, Chosen, config_options, read_file
from carryall.errors import UsageError
from carryall.options import Option, declared

FIELDS = {(table, name): one for table, owner in TABLES.items() for name, one in declared(owner).items()}
ENGINE_VERBS = ("run", "chat", "serve", "batch", "bench")
# Fields that do not apply to a verb. bench makes its own prompts and as many slots as it needs, eval
# reads texts without an engine, and only a service has clients that a full queue could refuse.
LORA = {"loras", "max_loras", "max_lora_rank", "lora_modules"}  # they measure the base model
WITHOUT = {
    "run": {"max_queue", "max_queued_tokens"},
    "chat": {"max_queue", "max_queued_tokens"},
    "serve": set[str](),
    "batch": {
        "max_queue",
        "max_queued_tokens",
        "max_step_slowdown",
        "logits_processors",
    },  # prompts first; a job is JSON
    "bench": {"max_queue", "max_queued_tokens", "max_slots", "chat_template", "tool_prompt", *LORA},
    "eval": {
        *declared(EngineConfig),
        *("speculative", "num_speculative_tokens", "chat_template", "tool_prompt", *LORA),
    },
}


class Processor:
    """A logits processor that can be imported."""

    def wants(self, params: Any) -> bool:
        return False

    def apply(self, logits: Any, states: Any) -> None:
        raise AssertionError


def other_value(option: Option) -> tuple[str, Any]:
    """Return a string and its parsed value, which differs from the option's default."""
    if option.name == "provider_options":
        return "threads=3", {"threads": 3}
    if option.name == "loras":
        return "a=folder", {"a": "folder"}
    if option.name == "lora_modules":
        return "q_proj", ("q_proj",)
    if option.name == "logits_processors":
        return f"{__name__}:Processor", None
    if option.name == "rope_scaling":
        return "yarn:4", "yarn:4"
    if option.name == "num_speculative_tokens":
        return "3", 3
    if option.choices:
        text = str(next(choice for choice in option.choices if choice != option.default))
        return text, text
    kind = option.kinds[0]
    if kind is bool:
        return str(not option.default).lower(), not option.default
    if kind is int:
        return "7", 7
    if kind is float:
        return "3.5", 3.5
    return "word", Path("word") if kind is Path else "word"


def verb(name: str) -> click.Command:
    command = carryall.get_command(click.Context(carryall), name)
    assert command is not None
    return command.commands["run"] if isinstance(command, click.Group) else command


@pytest.mark.parametrize("name", WITHOUT)
def test_every_field_is_an_explained_flag_and_variable_of_every_verb(name: str) -> None:
    parameters = {parameter.name: parameter for parameter in verb(name).params}
    for (_, field), option in FIELDS.items():
        if field in WITHOUT[name]:
            assert field not in parameters or field == "max_slots"
            continue
        parameter = parameters[field]
        assert parameter.envvar == f"CARRYALL_{field.upper()}"
        if isinstance(parameter, click.Option):
            assert parameter.help
            assert parameter.opts[0].startswith("--" + field.replace("_", "-").rstrip("s"))
        else:
            assert field == "model"
        assert option.help


@pytest.fixture
def shown() -> Callable[..., Any]:
    """Return the values that a command with all options receives."""
    seen: list[Chosen] = []

    @click.command()
    @config_options()
    def show(chosen: Chosen) -> None:
        seen.append(chosen)

    def run(*args: str, **environment: str) -> Chosen | Result:
        seen.clear()
        result = CliRunner().invoke(show, list(args), env=environment)
        return seen[0] if seen else result

    return run


def chosen_value(chosen: Chosen, table: str, field: str) -> Any:
    return getattr(getattr(chosen, table), field)


def partner(field: str) -> tuple[str, ...]:
    """Return the flags that a field needs."""
    if field in ("max_lora_rank", "lora_modules"):
        return ("--max-loras", "1")
    if field == "numa":
        return ("--tensor-parallel", "2")
    if field == "pipeline_stages":
        return ("--pipeline", "local")
    return ("--speculative", "prompt-lookup") if field == "num_speculative_tokens" else ()


@pytest.mark.parametrize(("table", "field"), FIELDS)
def test_each_can_be_set_in_three_ways(
    table: str, field: str, shown: Callable[..., Any], tmp_path: Path
) -> None:
    option, file = FIELDS[table, field], tmp_path / "options.toml"
    text, value = other_value(option)
    model = [] if field == "model" else ["M"]
    flag = next((flag for flag in option.flags), f"--{field.replace('_', '-')}")
    given = [text] if field == "model" else [flag, text]
    if option.kinds == (bool,):
        given = [f"--{'' if value else 'no-'}{flag[2:]}"]
        written = text
    elif field == "provider_options":
        written = "{threads = 3}"
    elif field == "loras":
        written = '{a = "folder"}'
    elif option.repeated:
        written = f'["{text}"]'
    else:
        written = text if isinstance(value, int | float) else f'"{text}"'
    file.write_text(f"[{table}]\n{field} = {written}\n")
    by_flag = shown(*model, *given, *partner(field))
    by_variable = shown(*model, *partner(field), **{f"CARRYALL_{field.upper()}": text})
    by_file = shown(*model, *partner(field), "--config", str(file))
    for found in (by_flag, by_variable, by_file):
        assert isinstance(found, Chosen), found.output
        if field == "logits_processors":
            assert [type(one).__name__ for one in found.engine.logits_processors] == ["Processor"]
        else:
            assert chosen_value(found, table, field) == value
            assert value != option.default


def test_flags_go_before_variables_and_these_before_the_file(
    shown: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "options.toml"
    file.write_text('[model]\nmodel = "F"\n[engine]\nmax_slots = 5\nkv_bytes = "2GB"\nprefix_cache = false\n')
    variables = {"CARRYALL_CONFIG": str(file), "CARRYALL_MAX_SLOTS": "6"}
    assert shown("M", "--max-slots", "7", **variables).engine.max_slots == 7
    assert shown("M", **variables).engine.max_slots == 6
    found = shown(CARRYALL_CONFIG=str(file))
    assert found.model.model == "F"
    assert found.engine == EngineConfig(max_slots=5, kv_bytes=2 * 10**9, prefix_cache=False)
    assert shown("M").engine == EngineConfig()
    assert shown("M", "--prefix-cache", "--kv-bytes", "none", **variables).engine.kv_bytes is None
    assert shown("M", "--prefix-cache", **variables).engine.prefix_cache


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[engin]\nmax_slots = 1", "has no option 'engin'; did you mean 'engine'?"),
        ("[engine]\nmax_slot = 1", "has no option 'max_slot'; did you mean 'max_slots'?"),
        ("[engine]\nprovider = 'cpu'", "has no option 'provider'"),
        ('[engine]\nmax_slots = "1"', "must be an integer of at least 1, not '1'"),
        ("[engine]\nmax_slots = true", "must be an integer of at least 1, not True"),
        ("[engine]\nmax_step_slowdown = nan", "must be a number of at least 1, not nan"),
        ("[engine]\nkv_bytes = '2 bananas'", "must be a number of bytes"),
        ("engine = 3", "must be a table, not 3"),
        ("[engine", "cannot be read as TOML"),
    ],
)
def test_faults_of_a_file_are_named(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=r"options\.toml") as caught:
        read_file(file)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--max-slots", "x"], "max_slots must be an integer of at least 1, not 'x'"),
        (["--max-slots", "0"], "max_slots must be an integer of at least 1, not 0"),
        (["--max-step-slowdown", "nan"], "max_step_slowdown must be a number of at least 1, not nan"),
        (["--kv-cache-dtype", "int3"], "kv_cache_dtype must be one of int8, bfloat16, float32"),
        (["--logits-processors", "no_such_module:x"], "logits_processors must be a BatchLogitsProcessor"),
        (["--provider-option", "device"], "not NAME=VALUE"),
        (["--max-slots", "9" * 5000], "max_slots must be an integer"),
    ],
)
def test_faults_of_flags_are_named(args: list[str], words: str, shown: Callable[..., Any]) -> None:
    result = shown("M", *args)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_values_of_provider_options_are_numbers_booleans_or_text(shown: Callable[..., Any]) -> None:
    given = ["device=1", "compute=bf16", "cuda_graphs=false", "memory_fraction=0.5", "path=a=b"]
    found = shown("M", *(part for text in given for part in ("--provider-option", text)))
    expected = {"device": 1, "compute": "bf16", "cuda_graphs": False, "memory_fraction": 0.5, "path": "a=b"}
    assert found.model.provider_options == expected


def test_an_option_without_its_companion_is_an_error() -> None:
    with pytest.raises(UsageError, match="num_speculative_tokens has no effect without speculative"):
        ModelConfig(model="M", num_speculative_tokens=3)
    with pytest.raises(UsageError, match="ep_library replaces provider"):
        ModelConfig(model="M", provider="cuda", ep_library=Path("x.so"))


def test_no_model_is_an_error(shown: Callable[..., Any]) -> None:
    assert "no model is given" in str(shown().exception)


def test_a_prompt_alone_is_enough_where_the_model_is_configured(
    tiny_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["run", "some words", "--max-tokens", "2", "--quiet"]
    result = CliRunner().invoke(carryall, args)
    assert (result.exit_code, "no model 'some words'" in result.output) == (2, True), result.output
    result = CliRunner().invoke(carryall, args, env={"CARRYALL_MODEL": str(tiny_package)})
    assert result.exit_code == 0, result.output


def test_a_chat_template_can_be_given(tiny_package: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    args = ["chat", "demo", "--max-tokens", "2", "--quiet"]
    refused = CliRunner().invoke(carryall, args, input="x\n")
    assert "--chat-template" in str(refused.output)
    result = CliRunner().invoke(carryall, [*args, "--chat-template", str(template)], input="x\n")
    assert result.exit_code == 0, result.output
    missing = CliRunner().invoke(carryall, [*args, "--chat-template", str(tmp_path / "no")], input="x\n")
    assert (missing.exit_code, "cannot be read" in missing.output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--grpc-port", "none"], {}),
        ([], {"CARRYALL_GRPC_PORT": "none"}),
        (["--config", "FILE"], {}),
    ],
)
def test_none_switches_off_what_has_a_default(
    arguments: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "service.toml"
    file.write_text('[server]\ngrpc_port = "none"\n')
    found: list[Chosen] = []

    @click.command()
    @config_options(tables=SERVER_TABLES)
    def command(chosen: Chosen) -> None:
        found.append(chosen)

    given = [str(file) if each == "FILE" else each for each in arguments]
    CliRunner().invoke(command, ["m", *given], env=environment, catch_exceptions=False)
    assert (found[0].server.grpc_port, found[0].server.http_port) == (None, 8000)


def test_changed_options_of_the_model_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "service.toml"
    file.write_text("[model]\ncontext_length = 64\n[engine]\nmax_slots = 2\n[server]\nmax_choices = 3\n")
    found: list[Chosen] = []

    @click.command()
    @config_options(tables=SERVER_TABLES)
    def command(chosen: Chosen) -> None:
        found.append(chosen)

    CliRunner().invoke(command, ["m", "--config", str(file)], catch_exceptions=False)
    assert found[0].reread is not None
    file.write_text("[model]\ncontext_length = 65\n[engine]\nmax_queue = 3\n[server]\nmax_choices = 4\n")
    assert found[0].reread().max_choices == 4
    (record,) = caplog.records
    names = "context_length, max_slots, max_queue"
    assert record.getMessage() == f"these settings change after a restart only: {names}"


def test_the_file_is_read_again_and_flags_and_variables_stay(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text('[server]\nmax_choices = 3\nmax_logprobs = 3\nmax_body_bytes = "1MB"\n')
    found: list[Chosen] = []

    @click.command()
    @config_options(tables=SERVER_TABLES)
    def command(chosen: Chosen) -> None:
        found.append(chosen)

    arguments = ["m", "--config", str(file), "--max-choices", "5"]
    CliRunner().invoke(command, arguments, env={"CARRYALL_STRICT": "true"}, catch_exceptions=False)
    (chosen,) = found
    assert chosen.reread is not None
    assert chosen.reread() == chosen.server
    file.write_text('[server]\nmax_choices = 4\nmax_logprobs = 4\nstrict = false\ngrpc_port = "none"\n')
    again = chosen.reread()
    assert (again.max_choices, again.max_logprobs, again.strict, again.grpc_port) == (5, 4, True, None)
    assert again.max_body_bytes == 16 * 2**20  # the default
    file.write_text("[server]\nmax_choice = 4\n")
    with pytest.raises(UsageError, match="did you mean 'max_choices'"):
        chosen.reread()
    CliRunner().invoke(command, ["m"], catch_exceptions=False)
    assert found[1].reread is None
