"""A model that answers by a rule over the rendered conversation, at the seam of the runner.

All else is the service's own: template, cache, grammar, sampling, parser. The rule sees what the model sees.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from chat_styles import template
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from carryall.exporter.demo import demo_path
from carryall.providers.base import Row, RunnerConfig
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.engine.engine import EngineConfig
from carryall.runtime.models.generation_defaults import GenerationDefaults
from carryall.runtime.models.loading import LoadedModel
from carryall.runtime.text.chat_template import ChatTemplate
from carryall.runtime.text.tokenizer import Tokenizer

OPEN, CLOSE = "<|turn>", "<turn|>"  # around a turn in templates of ``chat_styles``


@dataclass(frozen=True)
class Turn:
    """A turn as the template wrote it."""

    role: str
    text: str


@dataclass(frozen=True)
class Call:
    """An answer that calls a tool."""

    name: str
    arguments: Mapping[str, Any]


Rule = Callable[[list[Turn]], str | Call]


def turns_of(prompt: str) -> list[Turn]:
    """The turns of a rendered conversation."""
    parts = [part.split(CLOSE)[0] for part in prompt.split(OPEN)[1:]]
    return [Turn(*part.split("\n", 1)) if "\n" in part else Turn(part, "") for part in parts]


class ScriptedRunner(NullRunner):
    """The toy cache with the logits of a rule: after each prefix, the longest token of the rule's answer.

    Shorter tokens of the answer come next, so that a grammar which forbids the longest one takes them.

    Args:
        config: see ``NullRunner``.
        tokenizer: of the model.
        rule: the answer to a conversation.
        written: an answer as the template writes it.
    """

    def __init__(
        self, config: RunnerConfig, tokenizer: Tokenizer, rule: Rule, written: Callable[[str | Call], str]
    ) -> None:
        super().__init__(config, NullOptions(vocab_size=tokenizer.vocab_size))
        self._tokenizer, self._rule, self._written = tokenizer, rule, written
        self._past: dict[int, tuple[int, int]] = {}  # by hash of a prefix, that before it and the last token
        self._answers: dict[int, str] = {}
        self._ids = {tokenizer.decode([token], skip_special_tokens=False): token
                     for token in range(tokenizer.vocab_size)}  # fmt: skip
        self._longest = max(map(len, self._ids))
        self._open = self._ids[OPEN]

    def _extend(self, row: Row) -> list[int]:
        hashes = super()._extend(row)
        for at, token in enumerate(row.tokens.tolist(), start=row.start):
            self._past[hashes[at]] = (hashes[at - 1] if at else 0, token)
        return hashes

    def _logits(self, value: int) -> npt.NDArray[np.float32]:
        logits = np.full(self.info.vocab_size, -20.0, np.float32)
        left = self._left(value)
        for length in range(1, min(len(left), self._longest) + 1):
            if (token := self._ids.get(left[:length])) is not None:
                logits[token] = 20 * length  # so that no draw takes a shorter one
        return logits

    def _left(self, value: int) -> str:
        """What the answer to a prefix still lacks."""
        tokens: list[int] = []
        at = value
        while at and self._past[at][1] != self._open:
            at, token = self._past[at]
            tokens.append(token)
        turn = self._text(tokens[::-1])
        if at not in self._answers:
            self._answers[at] = self._written(self._rule(turns_of(self._text(self._tokens(at)) + turn)))
        written = turn.split("\n", 1)[1] if "\n" in turn else ""
        answer = self._answers[at]
        return answer[len(written) :] if answer.startswith(written) else CLOSE

    def _tokens(self, value: int) -> list[int]:
        tokens: list[int] = []
        while value:
            value, token = self._past[value]
            tokens.append(token)
        return tokens[::-1]

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


def chat_tokenizer(folder: Path, *further: str) -> Tokenizer:
    """The tokenizer of the embedded model, with the markers of turns and further texts as tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_path("pycoder") / name).read_bytes())
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.add_special_tokens([AddedToken(text, special=True) for text in (OPEN, CLOSE)])
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in further])
    raw.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@asynccontextmanager
async def scripted_llm(
    folder: Path,
    rule: Rule,
    style: str = "tagged objects",
    *,
    thoughts: str = "no thoughts",
    context_length: int = 200_000,
    engine: EngineConfig | None = None,
) -> AsyncIterator[AsyncLLM]:
    """Yield a model that answers by a rule and writes calls and thoughts in styles of ``chat_styles``."""
    tokenizer = chat_tokenizer(folder, "<call>", "</call>", "<calls>", "</calls>")
    chat = ChatTemplate({"default": template(style, thoughts)}, {})
    question: dict[str, Any] = {"role": "user", "content": "x"}

    def written(answer: str | Call) -> str:
        if isinstance(answer, str):
            return answer + CLOSE
        call = {"id": "a", "type": "function",
                "function": {"name": answer.name, "arguments": dict(answer.arguments)}}  # fmt: skip
        asked = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
        text = chat.render(asked, add_generation_prompt=False)
        return text.split(f"{OPEN}assistant\n")[1].split(CLOSE)[0] + CLOSE

    config = RunnerConfig(max_slots=8, context_length=context_length)
    runner = ScriptedRunner(config, tokenizer, rule, written)
    end = tokenizer.encode(CLOSE)[-1]
    model = LoadedModel("toy", runner, tokenizer, chat, GenerationDefaults(frozenset([end]), {}))
    llm = AsyncLLM(model, engine_config=engine or EngineConfig())
    try:
        yield llm
    finally:
        llm.shutdown()


def repair(turns: list[Turn]) -> str | Call:
    """Read the file that the user names, repair its subtraction, run its test, and tell the result.

    The tools are found by their names and the properties of their schemas, as each client has its own. The
    edit is made of what the file's text says, and the last answer of what the test printed.
    """
    tools = {tool["function"]["name"]: tool["function"] for turn in turns if turn.role == "tools"
             for tool in json.loads(turn.text)}  # fmt: skip
    prompt = "\n".join(turn.text for turn in turns)
    users = "\n".join(turn.text for turn in turns if turn.role == "user")
    path = re.search(r"Repair (\S+calc\.py)", users)
    if not tools and "SEARCH/REPLACE" in prompt:  # aider edits by texts, and tests by itself
        line = re.search(r" *return left - right", prompt)
        old = line[0] if line is not None else ""
        fixed = old.replace("-", "+")
        return f"calc.py\n```python\n<<<<<<< SEARCH\n{old}\n=======\n{fixed}\n>>>>>>> REPLACE\n```"
    if "[[ ## " in prompt:
        return _fields(turns[-2].text, path[1] if path is not None else "")
    if not tools or path is None:
        return "Repair of calc.py"  # such as the title of a conversation
    results = [turn.text for turn in turns if turn.role == "tool"]
    results = results or users.split("Observation:\n")[1:]  # as smolagents sends them
    said = _next_step(tools, path[1], results)
    final = _tool(tools, "final_answer", "submit_and_exit", "attempt_completion")
    return said if isinstance(said, Call) or not final else _call(final, answer=said)


def _next_step(tools: Mapping[str, Any], target: str, results: Sequence[str]) -> str | Call:
    """The call, or the answer, after the results of the calls before."""
    steps = len(results)
    shell = _tool(
        tools, "exec_command", "shell_command", "bash", "shell", "run_commands", "run_terminal_command"
    )
    read, edit = _tool(tools, "read", "read_file", "read_files"), _tool(tools, "edit", "edit_file", "editor")
    if steps == 0:
        return _call(read, path=target) if read else _call(shell, command=f"cat {target}")
    line = re.search(r"return left - right", results[0])
    if line is None:
        return "The file has no subtraction."
    if steps == 1:
        fixed = line[0].replace("-", "+")
        if edit:
            return _call(edit, path=target, old=line[0], new=fixed)
        return _call(shell, command=f"sed -i 's/{line[0]}/{fixed}/' {target}")
    if steps == 2:
        return _call(shell, command="python3 test_calc.py")
    return "The test passes." if "calc is right" in results[-1] else f"The test fails: {results[-1][:200]}"


def _fields(asked: str, target: str) -> str:
    """The fields that DSPy asks for in its last message."""
    done = re.findall(r"\[\[ ## observation_\d+ ## \]\]\n(.*?)\n\n\[\[ ##", asked + "\n\n[[ ##", re.DOTALL)
    calls: list[tuple[str, dict[str, str]]] = [
        ("read_file", {"path": target}),
        ("edit_file", {"path": target, "old": "return left - right", "new": "return left + right"}),
        ("shell", {"command": "python3 test_calc.py"}),
        ("finish", {}),
    ]
    name, arguments = calls[min(len(done), 3)]
    passed = any("calc is right" in text for text in done)
    told = "The test passes." if passed else "The test fails."
    values = {
        "answer": "4", "reasoning": "Two and two.", "next_thought": "Go on.", "next_tool_name": name,
        "next_tool_args": json.dumps(arguments), "result": told,
    }  # fmt: skip
    wanted = re.findall(r"`\[\[ ## (\w+) ## \]\]`", asked.rpartition("Respond with")[2])
    return "\n\n".join(f"[[ ## {field} ## ]]\n{values.get(field, '')}" for field in wanted)


def _tool(tools: Mapping[str, Any], *names: str) -> Any:
    known = {name.lower().rpartition("-")[2].replace(" ", "_"): tool for name, tool in tools.items()}
    return next((known[name] for name in names if name in known), None)


_MEANT = {"path": r"path|file", "old": r"old", "new": r"new", "command": r"command|cmd",
          "answer": r"answer|result"}  # fmt: skip


def _call(tool: Any, **values: str) -> Call:
    """A call with values by the meaning of the properties; a required one without meaning gets a text."""
    schema = tool["parameters"]
    arguments: dict[str, Any] = {}
    for name, kind in schema["properties"].items():
        meant = _meant(name, values)
        if meant is not None and (value := _value(kind, meant)) is not None:
            arguments[name] = value
        elif name in schema.get("required", ()):
            arguments[name] = "as asked"
    return Call(tool["name"], arguments)


def _meant(name: str, values: Mapping[str, str]) -> str | None:
    return next((value for key, value in values.items() if re.search(_MEANT[key], name, re.IGNORECASE)), None)


def _value(kind: Any, text: str) -> Any:
    """A text as a schema has it: itself, in a list, or in an object; None if it fits nowhere."""
    if kind.get("type") == "array":
        inner = _value(kind["items"], text)
        return None if inner is None else [inner]
    if kind.get("type") == "object":
        name = next((name for name in kind["properties"] if _meant(name, {"path": text})), None)
        return None if name is None else {name: text}
    kinds = [kind, *kind.get("anyOf", ())]
    return text if any(each.get("type") == "string" for each in kinds) else None
