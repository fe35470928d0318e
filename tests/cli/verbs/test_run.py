"""``carryall run`` and ``carryall chat``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tiny_models import write_tiny

from carryall import LLM, SamplingParams
from carryall.cli import carryall

PROMPT = "def fibonacci(n):"


def run(*args: object, stdin: str = "") -> Result:
    return CliRunner().invoke(carryall, [str(arg) for arg in args], input=stdin)


def test_the_text_is_what_the_library_generates(tiny_package: Path) -> None:
    with LLM(tiny_package) as llm:
        expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    result = run("run", tiny_package, PROMPT, "--raw", "--max-tokens", 12, "--temperature", 0)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected.text + "\n"
    assert result.stderr == ""
    found = json.loads(
        run("run", tiny_package, PROMPT, "--raw", "--max-tokens", 12, "--temperature", 0, "--json").stdout
    )
    assert found["text"] == expected.text
    assert found["token_ids"] == expected.token_ids
    assert found["tokens"] == len(expected.token_ids)
    assert found["finish_reason"] == expected.finish_reason
    assert found["tokens_per_second"] > 0


def test_json_tells_every_choice_and_what_speculation_did(tiny_package: Path) -> None:
    options = ("--max-tokens", 6, "--temperature", 1, "--seed", 3, "-n", 2, "--logprobs", 1)
    speculative = ("--speculative", "prompt-lookup", "--json")
    found = json.loads(run("run", tiny_package, PROMPT, "--raw", *options, *speculative).stdout)
    with LLM(tiny_package) as llm:
        params = SamplingParams(n=2, seed=3, max_tokens=6)
        expected = llm.generate(PROMPT, params)[0].outputs
    assert [choice["token_ids"] for choice in found["choices"]] == [one.token_ids for one in expected]
    for choice in found["choices"]:
        assert [logprobs[0]["token_id"] for logprobs in choice["logprobs"]] == choice["token_ids"]
        assert choice["tool_calls"] == []
    assert found["text"] == found["choices"][0]["text"]
    assert 0 <= found["accepted_tokens"] <= found["proposed_tokens"]
    shown = run("run", tiny_package, PROMPT, "--raw", *options).stdout
    assert f"[0] {expected[0].text}" in shown
    assert f"[1] {expected[1].text}" in shown


def test_samplers_reach_the_library(tiny_package: Path) -> None:
    given: dict[str, Any] = {
        "min_p": 0.1,
        "typical_p": 0.9,
        "dry_multiplier": 0.8,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
    }
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    found = run(
        "run", tiny_package, PROMPT, "--raw", *options, "--temperature", 1, "--seed", 1, "--max-tokens", 12
    )
    with LLM(tiny_package) as llm:
        expected = llm.generate(PROMPT, SamplingParams(seed=1, max_tokens=12, **given))[0].outputs[0].text
    assert found.stdout == expected + "\n"


@pytest.mark.long
def test_the_form_of_the_text_can_be_demanded(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    only = {"properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    schema.write_text(json.dumps({"type": "object", **only}))
    for value in (schema, f"@{schema}", schema.read_text()):
        assert json.loads(run("run", "demo", "x = ", "--json-schema", value).stdout) == {"a": 7}
    for value in ('start: "yes"', f"@{tmp_path / 'grammar'}", tmp_path / "grammar"):
        (tmp_path / "grammar").write_text('start: "yes"')
        assert run("run", "demo", "x = ", "--grammar", value).stdout == "yes\n"
    for value in (tmp_path / "missing.json", f"@{tmp_path / 'missing'}"):
        assert "cannot be read: No such file" in run("run", "demo", "x", "--json-schema", value).stderr
    assert run("run", "demo", "x = ", "--regex", "[0-9]{3}").stdout.strip().isdigit()
    assert run("run", "demo", "x = ", "--choice", "left", "--choice", "right").stdout.strip() in (
        "left",
        "right",
    )
    both = run("run", "demo", "x = ", "--json-object", "--regex", "a")
    assert both.exit_code == 2
    assert "needs one of" in both.stderr


def test_tools_of_a_chat_are_checked(tiny_package: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text("{}")
    assert "--raw excludes --tools" in run("run", tiny_package, "hello", "--raw", "--tools", tools).stderr
    assert "a list of objects" in run("run", tiny_package, "hello", "--tools", tools).stderr
    tools.write_text('[{"type": "function", "function": {"name": "f", "parameters": {}}}]')
    asked = ("run", tiny_package, "hello", "--chat", "--tools", tools, "--max-tokens", 4, "--json")
    assert (
        "context" in run(*asked).stderr
    )  # a message describes the tools, which this small model cannot hold
    found = run(*asked, "--no-tool-prompt")
    assert json.loads(found.stdout)["choices"][0]["tool_calls"] == []


def test_help_has_sections() -> None:
    shown = run("run", "--help").stdout
    titles = [
        "Model and provider:",
        "Engine:",
        "Sampling:",
        "Repetition:",
        "Length and number:",
        "Structured output",
        "\nOptions:",
    ]
    assert sorted(titles, key=shown.index) == titles
    assert "--speculative" in shown.split("Model and provider:")[1].split("Engine:")[0]


def test_a_prompt_from_stdin_is_the_same(tiny_package: Path) -> None:
    options = ("--max-tokens", 8, "--temperature", 0)
    assert (
        run("run", tiny_package, "-", "--raw", *options, stdin=PROMPT).stdout
        == run("run", tiny_package, PROMPT, "--raw", *options).stdout
    )


def test_a_seed_makes_sampling_reproducible(tiny_package: Path) -> None:
    options = ("--max-tokens", 20, "--temperature", 1.5, "--json")
    texts = [
        json.loads(run("run", tiny_package, PROMPT, "--raw", *options, "--seed", seed).stdout)["text"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.long
def test_the_demo_runs_in_int4_in_its_own_process() -> None:
    command = [
        sys.executable,
        "-m",
        "carryall",
        "run",
        "demo",
        PROMPT,
        "--max-tokens",
        "8",
        "--quantize",
        "int4-fast",
        "-q",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ.copy())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--temperature", "-1"], 2, "temperature"),
        (["--max-tokens", "0"], 2, "max_tokens"),
        (["--provider", "gpu"], 2, "known providers"),
        (["--context-length", "100000"], 2, "context_length 100000"),
        (["--context-length", "4"], 2, "the context holds 4"),
        (["--seed", "x"], 2, "--seed"),
    ],
)
def test_wrong_use_gets_one_line(options: list[str], code: int, words: str, tiny_package: Path) -> None:
    result = run("run", tiny_package, PROMPT, "--raw", *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_empty_prompt_is_wrong_use(tiny_package: Path) -> None:
    assert "the prompt is empty" in run("run", tiny_package, "").stderr
    assert run("run", tiny_package, "-", stdin="").exit_code == 2
    other = CliRunner().invoke(carryall, ["run", str(tiny_package), "-"], input=b"ab\xff")
    assert (other.exit_code, "not UTF-8 text at byte 2" in other.output) == (2, True)


def test_chat_answers_each_line_with_the_history(tiny_package: Path) -> None:
    options = ("--max-tokens", 6, "--temperature", 0, "--system", "Be brief.")
    result = run("chat", tiny_package, *options, stdin="hello\n\nand again\n")
    assert result.exit_code == 0, result.output
    messages = [{"role": "system", "content": "Be brief."}]
    expected = ""
    with LLM(tiny_package) as llm:
        for question in ("hello", "and again"):
            messages.append({"role": "user", "content": question})
            answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].text
            messages.append({"role": "assistant", "content": answer})
            expected += answer + "\n"
    assert result.stdout == expected


def test_reset_forgets_the_history(tiny_package: Path) -> None:
    options = ("--max-tokens", 6, "--temperature", 0)
    first, again = run("chat", tiny_package, *options, stdin="hello\n/reset\nhello\n").stdout.splitlines()
    assert first == again


def test_a_text_that_ends_at_once_is_explained(tmp_path: Path) -> None:
    ends = write_tiny("llama", tmp_path / "ends")
    (ends / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(260))}))
    settings = json.loads((ends / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (ends / "tokenizer_config.json").write_text(json.dumps(settings))
    result = run("run", ends, "hello")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (0, "\n", 1)
    assert (
        "has no chat template, so the text was continued, as --raw does; the model ended it" in result.stderr
    )
    for silent in ("--raw", "--quiet"):
        assert run("run", ends, "hello", silent).stderr == ""


def test_run_asks_a_question_where_the_model_has_a_template(tiny_package: Path) -> None:
    options = ("--max-tokens", 6, "--temperature", 0)
    chat = run("chat", tiny_package, *options, stdin="hello\n").stdout
    assert chat.strip()
    for flags in ([], ["--chat"]):
        assert run("run", tiny_package, "hello", *flags, *options).stdout == chat
    assert run("run", tiny_package, "hello", "--raw", *options).stdout != chat


def test_run_without_a_prompt_is_a_conversation(tiny_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, lines = ("--max-tokens", 6, "--temperature", 0), "hello\nand again\n"
    chat = run("chat", tiny_package, *options, stdin=lines)
    assert chat.stdout.count("\n") >= 2
    assert run("run", tiny_package, *options, stdin=lines).stdout == chat.stdout
    monkeypatch.setenv("CARRYALL_MODEL", str(tiny_package))
    assert run("run", *options, stdin=lines).stdout == chat.stdout
    assert run("run", "hello", *options).stdout == run("chat", *options, stdin="hello\n").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo"], "demo has no chat template, so it needs a prompt"),
        (["demo", "--raw"], "need a prompt"),
        (["demo", "--json"], "need a prompt"),
        (["demo", "-n", "2"], "--best-of and --logprobs need a prompt"),
        (["demo", "hello", "--chat"], "chat template"),
        (["demo", "hello", "--chat", "--raw"], "--raw excludes --chat"),
    ],
)
def test_what_a_conversation_cannot_be_is_one_line(arguments: list[str], words: str) -> None:
    result = run("run", *arguments, stdin="hello\n")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert words in result.stderr


def test_chat_without_a_template_is_one_line() -> None:
    result = run("chat", "demo", stdin="hello\n")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "chat template" in result.stderr


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="pseudo terminals are Unix's")
def test_chat_at_a_terminal(tiny_package: Path) -> None:
    import pty

    leader, follower = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "carryall",
        "chat",
        str(tiny_package),
        "--max-tokens",
        "4",
        "--temperature",
        "0",
        "-q",
    ]
    with subprocess.Popen(
        command, stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(follower)
        os.write(leader, b"hello\n" + b"x" * 500 + b"\n/exit\n")
        out, error = process.communicate(timeout=120)
    os.close(leader)
    assert process.returncode == 0
    assert out.startswith("> ")
    assert error.startswith(
        "error: prompt is too long"
    )  # a message that is too long does not end the conversation


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="signals are Unix's")
def test_ctrl_c_ends_in_one_line() -> None:
    command = [
        sys.executable,
        "-c",  # the parent may ignore the signal, as nohup does, and children inherit that
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('carryall', run_name='__main__', alter_sys=True)",
        "run",
        "demo",
        "class Point:\n    def __init__(self, x, y):\n",  # greedy decoding repeats this for ever
        "--max-tokens",
        "900",
        "--temperature",
        "0",
        "-q",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # it is generating
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.strip() == "error: interrupted"
