"""What the pages show works: every block of code runs, or is listed with the reason why it does not.

In the fast tests the smallest embedded model stands for the larger one; the slow ones run what is written.
"""

from __future__ import annotations

import asyncio
import doctest
import json
import re
import shutil
import threading
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import documents
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from documents import Fence
from grpc_serving import serving
from http_serving import http_serving
from null_llm import null_llm

import carryall
from carryall.cli import carryall as command_line
from carryall.cli.load_options import read_file
from carryall.exporter.demo import demo_path

EXECUTED_ELSEWHERE = {
    "docs/adding_a_pass.md": "tests/graph_opt/passes/test_adding_a_pass.py",
    "docs/adding_a_provider.md": "tests/providers/test_adding_a_provider.py",
}
NOT_RUN = {
    "README.md: make demo     # embedded": "installs packages; continuous integration runs it",
    "README.md: python3 -m venv .venv": "installs packages; continuous integration runs it",
    "README.md: exporter/": "a list of folders",
    "CONTRIBUTING.md: git clone <this": "clones and installs",
    "CONTRIBUTING.md: git clone -c": "clones",
    "CONTRIBUTING.md: make check": "the test suite itself",
    "docs/adding_a_model_family.md: ": "two functions of a module, as in exporter/models/llama.py",
    "docs/batch.md: rows = ray.data": "needs a Ray cluster; tests/runtime/batch/workers runs it",
    "docs/batch.md: file = client.files": "needs a service with a folder; tests/runtime/batch/online runs it",
    "docs/serving.md: # config.toml in the folder": "tests/runtime/service/core/test_model_folder.py does",
    "docs/vectors.md: # config.toml in the folder": "tests/runtime/api/test_foreign_folders.py does",
    "docs/serving.md: # openssl rand": "tests/runtime/service/core/test_api_keys.py reads such files",
    "docs/lora.md: carryall run BASE": "needs an adapter; tests/runtime/models/test_lora_models.py has some",
    "docs/lora.md: from carryall": "needs an adapter; tests/runtime/models/test_lora_models.py has some",
    "docs/lora.md: curl localhost": "tests/runtime/service/http/test_lora_api.py uses both endpoints",
    "docs/clients.md: carryall agent claude": "starts agents; tests/cli/verbs/test_agent.py has one",
    "docs/clients.md: carryall serve qwen3": "starts agents; test_agents.py sends what they send",
    "docs/clients.md: model = ": "a file of Codex",
    "docs/cpu_kernels.md: carryall doctor": "compiles for half a minute; tests/providers/native builds it",
    "docs/cuda.md: pip install": "installs packages, and needs a GPU",
    "docs/webgpu.md: pip install": "installs packages, and needs a Vulkan device",
    "docs/webgpu.md: export ORT_WEBGPU": "needs a Vulkan device in software",
    "docs/directml.md: pip uninstall": "installs packages, and needs Windows and a GPU",
    "docs/vectors.md: from carryall import TextClassifier": "needs checkpoints; tests/runtime/api runs it",
    "docs/models.md: carryall export demo web": "tests/exporter/layouts/test_transformers_js.py runs it",
    "docs/models.md: cd examples/browser": "tests/exporter/layouts/test_browser.py opens the page",
    "docs/openvino.md: pip install": "installs packages; tests/providers/openvino runs the provider",
    "docs/benchmarks.md: ": "needs peers in environments of their own, and hours",
    "docs/openvino.md: python benchmarks": "needs peers in environments of their own, and minutes",
    "docs/programs.md: python benchmarks": "minutes",
    "docs/engine.md: python benchmarks": "minutes; needs a larger model",
}
# Commands inside of blocks that run.
NOT_RUN_COMMANDS = {
    "serve": "it runs until it is stopped; docs/serving.md is tested with a served model",
    "bench": "it measures for minutes; tests/cli/verbs/test_bench.py runs it",
}
# Blocks and commands that take more than a few seconds: the slow tests alone run them.
SLOW = {
    "README.md: import carryall",
    "docs/quantization.md: from carryall import QuantizationRecipe, evaluate, quantize",
}
SLOW_COMMANDS = {("README.md", "optimize")}


def listed(fence: Fence) -> bool:
    return fence.page in EXECUTED_ELSEWHERE or any(fence.key.startswith(start) for start in NOT_RUN)


RUN = [fence for fence in documents.fences() if not listed(fence)]


def test_every_block_is_run_or_listed() -> None:
    kinds = {"console", "python", "pycon", "json", "toml"}
    assert [fence.key for fence in RUN if fence.language not in kinds] == []
    keys = [fence.key for fence in documents.fences()]
    assert [start for start in NOT_RUN if not any(key.startswith(start) for key in keys)] == []
    for place in EXECUTED_ELSEWHERE.values():
        assert (documents.ROOT / place).is_file(), place


@pytest.mark.long
def test_every_module_that_a_page_names_exists() -> None:
    paths = [path.as_posix() for path in documents.ROOT.rglob("*.py") if ".venv" not in path.parts]
    invented = {"my_passes.py", "calc.py"}  # of examples
    missing = [
        (page.name, name)
        for page in documents.PAGES
        for name in re.findall(r"`([a-z0-9_/]+\.py)`", page.read_text(encoding="utf-8"))
        if name not in invented and not any(path.endswith(f"/{name}") for path in paths)
    ]
    assert missing == []


def find(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that words name, and the rest of them."""
    command: click.Command = command_line
    context = click.Context(command_line)
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(context, rest[0])
        assert found is not None, words
        command, rest = found, rest[1:]
    return command, rest


def test_every_command_and_option_that_a_page_names_exists() -> None:
    wrong: list[tuple[Any, ...]] = []
    count = 0
    for page, words in documents.mentioned():
        count += 1
        try:
            command, rest = find(words)
        except (click.UsageError, AssertionError):
            wrong.append((page, words))
            continue
        known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
        flags = {word.split("=")[0] for word in rest if re.match(r"--?[a-zA-Z]", word)}
        wrong += [(page, words, flag) for flag in flags - known]
    assert wrong == []
    assert count > 50


def save_net(body: str, shape: tuple[int, ...], name: str) -> Path:
    """Write a net of one layer with random weights; they are the input w."""
    sizes = "float[N, 64, 8, 8] x) => (float[N, K, L, M] y)"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> net ({sizes} {body}')
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, name)
    return Path(name)


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that holds every file and model that the pages name."""
    folder = tmp_path_factory.mktemp("documents")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("CARRYALL_CACHE", str(tmp_path_factory.mktemp("cache")))
        Path("requests.jsonl").write_text('{"prompt": "def f(", "max_tokens": 2}\n')
        Path("wiki.txt").write_text("def f(x):\n    return x + 1\n" * 40)
        carryall.export("draft", "qwen3")
        detector = save_net(
            "{ a = Conv <pads = [1, 1, 1, 1]> (x, w) y = Relu(a) }", (64, 64, 3, 3), "detector.onnx"
        )
        for name in ("model.onnx", "resnet.onnx"):
            shutil.copy(detector, name)
        save_net("{ a = MatMul(x, w) y = Relu(a) }", (8, 512), "encoder.onnx")
        for name in ("samples", "photos"):
            Path(name).mkdir()
            feed = np.random.default_rng(1).standard_normal((2, 64, 8, 8)).astype(np.float32)
            np.savez(Path(name, "one.npz"), x=feed)
        yield folder


def clean(sandbox: Path, before: set[Path]) -> None:
    for path in set(sandbox.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def run_commands(content: Fence, model: str) -> None:
    for words in documents.commands(content):
        assert words[0] == "carryall", words
        if words[1] in NOT_RUN_COMMANDS or (model != "demo" and (content.page, words[1]) in SLOW_COMMANDS):
            continue
        arguments = [model if word == "demo" else word for word in words[1:]]
        result = CliRunner().invoke(command_line, arguments)
        assert result.exit_code == 0, (arguments, result.output)


def namespace(fence: Fence, model: str) -> dict[str, Any]:
    """The names that a block takes as given."""
    if fence.page == "docs/programs.md":
        return {"llm": carryall.LLM(model, chat_template=_template())}
    if fence.page != "docs/generation.md":
        return {}
    llm = carryall.LLM(model, chat_template=_template())
    return {
        "llm": llm,
        **{name: getattr(carryall, name) for name in ("SamplingParams", "BeamSearchOptions")},
        "np": np,
        "prompt": "def f(",
        "digits": [1, 2],
        "messages": [{"role": "user", "content": "x"}],
        "documents": ["a yes", "b no"],
        "texts": ["a", "b"],
    }


def _template() -> Path:
    path = Path("template.jinja")
    path.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return path


def run_python(fence: Fence, model: str) -> None:
    source = fence.content.replace('"demo"', f'"{model}"').replace("tools=[...]", "tools=[]")
    names = namespace(fence, model)
    if fence.page in ("docs/serving.md", "docs/grpc.md") or "http://127.0.0.1:8000" in source:
        with served() as addresses:
            for usual, address in addresses.items():
                source = source.replace(usual, address)
            exec(compile(source, fence.page, "exec"), names)  # noqa: S102
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(source, fence.page, "exec"), names)  # noqa: S102 -- our own pages
    if "llm" in names:
        names["llm"].close()


class served:  # noqa: N801 -- used as a function
    """The addresses of a service that runs in a thread of its own, by those that the pages show."""

    def __enter__(self) -> dict[str, str]:
        self._ready, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(60)
        return self._addresses

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    async def _serve(self) -> None:
        async with (
            null_llm() as llm,
            serving(llm, any_model_name=True) as made,
            http_serving(llm, any_model_name=True) as http,
        ):
            grpc = made.address
            self._addresses = {
                "127.0.0.1:8000": http.url.removeprefix("http://"),
                "127.0.0.1:8001": grpc,
                "localhost:8001": grpc,
            }
            self._ready.set()
            await asyncio.to_thread(self._over.wait)


def run_session(fence: Fence, model: str) -> None:
    """Statements behind ``>>>``; what they print is an example, not a promise."""
    source = fence.content.replace('"demo"', f'"{model}"')
    test = doctest.DocTestParser().get_doctest(source, {}, fence.page, None, 0)
    assert test.examples
    exec(compile("".join(one.source for one in test.examples), fence.page, "exec"), {})  # noqa: S102


def run_data(fence: Fence, model: str) -> None:
    if fence.language == "json":
        text = fence.content.strip()
        lines = text.splitlines() if text.startswith('{"id"') else [text]
        assert [json.loads(line) for line in lines]
        return
    assert tomllib.loads(fence.content)
    Path("file.toml").write_text(fence.content)
    assert set(read_file(Path("file.toml"))) <= {"model", "engine", "server"}


RUNNERS = {
    "console": run_commands,
    "python": run_python,
    "pycon": run_session,
    "json": run_data,
    "toml": run_data,
}


def check(fence: Fence, model: str, sandbox: Path) -> None:
    before = set(sandbox.iterdir())
    try:
        RUNNERS[fence.language](fence, model)
    finally:
        clean(sandbox, before)


FAST = [fence for fence in RUN if fence.key not in SLOW]
AS_WRITTEN = [fence for fence in RUN if "demo" in fence.content or fence.key in SLOW]


@pytest.mark.long
@pytest.mark.parametrize("fence", FAST, ids=lambda fence: fence.key[:60])
def test_documented_commands_run(fence: Fence, sandbox: Path) -> None:
    check(fence, "draft", sandbox)


@pytest.mark.slow
@pytest.mark.parametrize("fence", AS_WRITTEN, ids=lambda fence: fence.key[:60])
def test_documented_commands_run_as_written(fence: Fence, sandbox: Path) -> None:
    check(fence, "demo", sandbox)


def test_the_stand_in_is_another_model() -> None:
    assert demo_path("draft") != demo_path("pycoder")
