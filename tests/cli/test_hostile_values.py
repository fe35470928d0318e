"""Every option and argument of every verb, with hostile values: one line on stderr, and nothing written.

The verbs come from the command group, so a new verb fails here until it has a row in ``ROWS``. Options are
tried with a few values each; the slow test tries all values. All names are inside a folder of the test.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from carryall.cli import carryall

LARGE = 1 << 30  # bytes of a file that has no end, as far as a configuration is concerned
NUMBERS = ("-1", "0", "nan", "inf", "1e999", "1e-320", "9" * 19, "9" * 30, "0x10", "1_0", "१", "abc")
TEXTS = ("", "\udcff", "é中", "x" * 5000, "{{", "((", "=", "a=b=c", "@", "@missing", "@binary", "null", "-")
FILES = ("empty", "binary", "folder", "missing/file", "endless", "loop", "pipe/", "nested.json", "x" * 300)
VALUES = (*NUMBERS, *TEXTS, *FILES)
SECONDS = 5.0  # of the processor; the clock of a busy machine tells nothing


@dataclass(frozen=True)
class Row:
    """A command that works, which hostile values are added to."""

    arguments: tuple[str, ...]
    models: tuple[int, ...] = ()  # places of arguments that name models or jobs
    without: tuple[str, ...] = ()  # options that are not tried
    works: bool = True


def row(text: str, *models: int, without: tuple[str, ...] = (), works: bool = True) -> Row:
    return Row(tuple(text.split()), models, without, works)


# Ray writes its own log records where it is installed, so its addresses are not tried.
ROWS = {
    "export": row("export checkpoint out -q", 1),
    # A report is measured for seconds; its name is refused as that of ``optimize`` is.
    "quantize": row("quantize package out -q", 1, without=("--report",)),
    "optimize": row("optimize package out -q", 1),
    "run": row("run package def -q --max-tokens 2", 1, without=("--pipeline",)),
    "chat": row("chat package -q --max-tokens 2", 1),
    # It would serve: what is refused is refused before the model, which is missing.
    "serve": row("serve missing/model --grpc-port 0 -q", 1, without=("--ray",), works=False),
    "agent": row("agent --url http://127.0.0.1:9 --print claude", works=False),  # nothing answers there
    "batch run": row("batch run lines.jsonl -o out.jsonl --model package -q", 6, without=("--ray",)),
    "batch status": row("batch status done.jsonl", 2),
    "batch cancel": row("batch cancel done.jsonl", 2, works=False),  # nobody works on it: exit code 1
    "batch merge": row("batch merge done.jsonl -o out.jsonl", 2),
    "batch report": row("batch report done.jsonl -o out.html", 2),
    "batch retry-failed": row("batch retry-failed done.jsonl -q", 2),
    "embed": row("embed missing/model text", works=False),  # encoders have tests of their own
    "rerank": row("rerank missing/model query text", works=False),
    "bench": row("bench missing/model -q --batch 1 --prompt-tokens 4 --new-tokens 2", 1, works=False),
    "plan": row("plan package --bandwidth 10GB", 1),
    "detect": row("detect package text.txt", 1, works=False),  # it has no watermark: exit code 1
    "eval": row("eval package --text text.txt --max-tokens 20 -q", 1),
    "inspect": row("inspect package", 1),
    "verify": row("verify package package --steps 2", 1, 2),
    "diff": row("diff package package", 1, 2),
    "pull": row("pull demo", works=False),  # what it downloads is in tests of its own
    "list": row("list"),
    "rm": row("rm missing", works=False),
    "cache list": row("cache list"),
    "cache prune": row("cache prune --max-size 1TB"),
    "cache clear": row("cache clear --yes"),
    "doctor": row("doctor -q", works=False),  # it takes seconds, and has tests of its own
    "demo": row("demo", without=("--prompt",), works=False),  # it runs on without one
    "families": row("families"),
}


def leaves(
    command: click.Command = carryall, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    """Every verb, with those of its own verbs."""
    if not isinstance(command, click.Group):
        yield " ".join(path), command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from leaves(found, (*path, name))


LEAVES = dict(leaves())
# Options of models and engines are the same for all verbs: one verb tries them.
SHARED = {max(one.opts, key=len) for one in LEAVES["run"].params if isinstance(one, click.Option)}
# What prints progress or documents, and the file of options, which has tests of its own.
PLAIN = {"--help", "--json", "--quiet", "--debug", "--config"}


def test_every_verb_has_a_row() -> None:
    assert set(LEAVES) == set(ROWS)


@pytest.fixture(scope="module")
def sandbox(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, tiny_package: Path
) -> Iterator[Path]:
    """A folder with everything that the rows name, where every command runs."""
    folder = tmp_path_factory.mktemp("sandbox")
    shutil.copytree(tiny_checkpoint, folder / "checkpoint")
    shutil.copytree(tiny_package, folder / "package")
    (folder / "lines.jsonl").write_text('{"prompt": "def f(", "max_tokens": 2}\n')
    (folder / "text.txt").write_text("def f(x):\n    return x\n" * 20)
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)) * 20)
    (folder / "folder").mkdir()
    (folder / "nested.json").write_text("[" * 100_000 + "]" * 100_000)
    (folder / "endless").touch()
    os.truncate(folder / "endless", LARGE)
    (folder / "loop").symlink_to("loop")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("CARRYALL_CACHE", str(tmp_path_factory.mktemp("cache")))
        made = run("batch", "run", "lines.jsonl", "-o", "done.jsonl", "--model", "package", "-q")
        assert made.exit_code == 0, made.output
        yield folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(carryall, list(arguments), input="x\n")


def content(folder: Path) -> dict[str, float]:
    """Files and folders by name; of files that a job keeps open between runs, the names only."""
    return {str(path.relative_to(folder)): path.lstat().st_size for path in folder.rglob("*")}


def check(sandbox: Path, arguments: tuple[str, ...]) -> int:
    """Run a command, which must end as documented; return its exit code. What it made is deleted."""
    before, start = content(sandbox), time.process_time()
    result = run(*arguments)
    spent, after = time.process_time() - start, content(sandbox)
    made = sorted(set(after) - set(before))
    for name in reversed(made):
        path = sandbox / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    shown = f"carryall {' '.join(one[:80] for one in arguments)!a}\n{result.output[-2000:]}"
    assert result.exception is None or isinstance(result.exception, SystemExit), (shown, result.exc_info)
    assert result.exit_code in (0, 1, 2), shown
    assert "Traceback" not in result.output, shown
    assert spent < SECONDS, (spent, shown)
    if result.exit_code and not answered_with_failures(result):
        lines = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
        assert [line[:7] for line in lines] == ["error: "], shown
        assert len(lines[0]) < 3000, shown
        assert result.stdout == "", shown
        assert made == [], shown
        assert after == before, shown
    return result.exit_code


def answered_with_failures(result: Result) -> bool:
    """A batch job that ran, and whose lines failed, is written: see ``carryall batch run --help``."""
    return result.exit_code == 1 and "failed lines are in" in result.stderr


def options(verb: str) -> list[str]:
    shared = set() if verb == "run" else SHARED - {"--max-tokens", "--quantize"}
    return [
        max(one.opts, key=len)
        for one in LEAVES[verb].params
        if isinstance(one, click.Option) and not one.is_flag
        if max(one.opts, key=len) not in shared | PLAIN | set(ROWS[verb].without)
    ]


def attempts(verb: str, flag: str, count: int | None) -> list[tuple[str, ...]]:
    """The commands of an option: ``count`` values chosen by its name, or all."""
    values = VALUES if count is None else random.Random(f"{verb} {flag}").sample(VALUES, count)
    return [(*ROWS[verb].arguments, flag, value) for value in values]


@pytest.mark.long
@pytest.mark.parametrize("verb", ROWS)
def test_a_few_values_of_every_option(verb: str, sandbox: Path) -> None:
    for flag in options(verb):
        for arguments in attempts(verb, flag, 2):
            check(sandbox, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ROWS)
def test_all_values_of_every_option(verb: str, sandbox: Path) -> None:
    for flag in options(verb):
        for arguments in attempts(verb, flag, None):
            check(sandbox, arguments)


@pytest.mark.long
@pytest.mark.parametrize("verb", [verb for verb in ROWS if ROWS[verb].models])
def test_files_that_are_not_models_or_jobs(verb: str, sandbox: Path) -> None:
    for place in ROWS[verb].models:
        for value in (*FILES, "", "\udcff", "x" * 5000):
            arguments = list(ROWS[verb].arguments)
            arguments[place] = value
            assert check(sandbox, tuple(arguments)) in (1, 2), arguments


def test_files_that_hold_no_requests(sandbox: Path) -> None:
    """An empty file holds none, which is fine; lines that cannot be read fail one by one."""
    for value in (*set(FILES) - {"endless"}, "", "\udcff"):  # a gigabyte of input is read
        check(sandbox, ("batch", "run", value, *ROWS["batch run"].arguments[3:]))


@pytest.mark.parametrize("verb", ROWS)
def test_arguments_that_are_too_many_or_unknown(verb: str, sandbox: Path) -> None:
    takes_any = verb in ("batch run", "batch merge")
    for extra in (["--no-such-option"], ["--json=maybe"], [] if takes_any else ["one", "two", "three"]):
        if extra:
            assert check(sandbox, (*ROWS[verb].arguments, *extra)) == 2


@pytest.mark.long
@pytest.mark.parametrize("verb", [verb for verb in ROWS if ROWS[verb].works])
def test_the_rows_themselves_work(verb: str, sandbox: Path) -> None:
    if verb == "cache clear":
        pytest.skip("the other rows need the cache")
    assert check(sandbox, ROWS[verb].arguments) == 0
