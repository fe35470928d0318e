"""Sessions of a coding agent as it sends them to a service: tools, thoughts, sub-agents, a line that changes.

A session is generated from a seed and has no text of a real client. Its form is Claude Code's: a title is
asked for first; each request has a system prompt of several texts, whose first has a checksum that differs
between conversations (``cch=``); all tools are in each request; the mark of caching moves to the newest
message; a sub-agent has a conversation of its own, and its answer is the result of a tool in the main one.
The recorded answers, not those of the model under test, go into the next request.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_heads import add_head
from tiny_models import write_tiny

from carryall.exporter.demo import demo_path

Json = dict[str, Any]

_NOUNS = """
    account address batch branch buffer button cache camera chart client clock column cookie cursor device
    editor engine event field filter folder frame graph handler header index journal kernel label layer ledger
    letter matrix meter mirror module number object option packet parser policy printer profile queue record
    region report router sample schema score sensor session signal socket source storage stream table target
    ticket timer token tracker tree value vector view wallet window worker
""".split()  # noqa: SIM905 -- a list literal takes 80 lines
_VERBS = """
    add check close collect count drop find load merge move open parse read send sort split write
""".split()  # noqa: SIM905 -- as above
_TOOLS = ("Agent", "Bash", "Edit", "Glob", "Grep", "Read", "TodoWrite", "WebFetch", "WebSearch", "Write")


@dataclass(frozen=True)
class Step:
    """One request of a session.

    Args:
        conversation: which conversation it belongs to; sub-agents have their own.
        body: of the request to ``/v1/messages``, without ``model`` and ``max_tokens``.
        rewrites: whether the user wrote again, so that a template drops the thoughts before.
    """

    conversation: str
    body: Json
    rewrites: bool = False


@dataclass
class Conversation:
    """A conversation that grows; each look at it is a request.

    Args:
        name: tells it apart from others.
        system: texts of the system prompt behind the line with the checksum.
        tools: what may be called.
        checksum: of the line that a client puts first.
    """

    name: str
    system: tuple[str, ...]
    tools: list[Json]
    checksum: str
    messages: list[Json] = field(default_factory=list)

    def step(self, *, rewrites: bool = False) -> Step:
        """The request that asks for the next answer."""
        line = f"x-anthropic-billing-header: cc_version=2.1.181.a3f; cc_entrypoint=cli; cch={self.checksum};"
        system = [{"type": "text", "text": text} for text in (line, *self.system)]
        messages = [*self.messages[:-1], _cached(self.messages[-1])]
        body: Json = {"system": system, "messages": messages}
        return Step(self.name, body | ({"tools": self.tools} if self.tools else {}), rewrites)

    def say(self, role: str, *blocks: Json) -> None:
        """Add a message."""
        self.messages.append({"role": role, "content": list(blocks)})


def _cached(message: Json) -> Json:
    blocks = message["content"]
    marked = {**blocks[-1], "cache_control": {"type": "ephemeral"}}
    return {**message, "content": [*blocks[:-1], marked]}


class Session:
    """A writer of sessions.

    Args:
        seed: of its words.
        scale: of the length of its texts: with 1 the last prompt of three tasks has about 60,000 tokens of
            the demo's vocabulary.
    """

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        self._rng, self._scale, self._calls = random.Random(seed), 4.5 * scale, 0
        self._tools = [self._tool(name) for name in _TOOLS]
        self._manual = self._prose(120)

    def steps(self, tasks: int = 3) -> Iterator[Step]:
        """Yield the requests of a session with a title, tasks of the user, and two sub-agents at a time."""
        title = Conversation("title", ("Write a title of at most 50 characters.",), [], self._checksum())
        title.say("user", _text(self._prose(1)))
        yield title.step()
        main = Conversation("main", ("You are a coding agent.", self._manual), self._tools, self._checksum())
        reminder = f"<system-reminder>\n{self._prose(8)}\n</system-reminder>"
        for task in range(tasks):
            first = [_text(reminder)] if task == 0 else []
            main.say("user", *first, _text(self._prose(2)))
            yield main.step(rewrites=task > 0)
            for tool, lines in (("Read", 60), ("Grep", 20), ("Edit", 4), ("Bash", 15)):
                self._call(main, tool, self._code(lines))
                yield main.step()
            yield from self._delegate(main, task)
            main.say("assistant", _thought(self._prose(1)), _text(self._prose(1)))

    def _delegate(self, main: Conversation, task: int) -> Iterator[Step]:
        """Yield the requests of two sub-agents in turn, and the main one with their answers."""
        agents = [
            Conversation(
                f"agent {task}.{number}",
                ("You are a sub-agent.", self._manual),
                self._tools[1:],
                self._checksum(),
            )
            for number in range(2)
        ]
        for agent in agents:
            agent.say("user", _text(self._prose(2)))
        for tool, lines in (("Grep", 12), ("Read", 40)):
            for agent in agents:
                yield agent.step()
                self._call(agent, tool, self._code(lines))
        for agent in agents:
            yield agent.step()
        calls = [self._use("Agent") for _ in agents]
        main.say("assistant", _thought(self._prose(1)), *calls)
        main.say("user", *(_result(call, self._prose(4)) for call in calls))
        yield main.step()

    def _call(self, conversation: Conversation, tool: str, result: str) -> None:
        call = self._use(tool)
        conversation.say("assistant", _thought(self._prose(1)), _text(self._prose(1)), call)
        conversation.say("user", _result(call, result))

    def _use(self, tool: str) -> Json:
        self._calls += 1
        arguments = {"path": f"/src/{self._noun()}/{self._noun()}.py", "count": self._rng.randrange(99)}
        return {"type": "tool_use", "id": f"toolu_{self._calls:04}", "name": tool, "input": arguments}

    def _tool(self, name: str) -> Json:
        properties = {
            "path": {"type": "string", "description": self._prose(1)},
            "count": {"type": "integer", "description": self._prose(1)},
        }
        schema = {"type": "object", "properties": properties, "required": ["path"]}
        return {"name": name, "description": self._prose(6), "input_schema": schema}

    def _checksum(self) -> str:
        return f"{self._rng.randrange(16**5):05x}"

    def _noun(self) -> str:
        return self._rng.choice(_NOUNS)

    def _times(self, count: int) -> range:
        return range(max(1, round(count * self._scale)))

    def _prose(self, sentences: int) -> str:
        choice = self._rng.choice
        return " ".join(
            f"{choice(_VERBS).title()} the {self._noun()} of each {self._noun()} before you {choice(_VERBS)} "
            f"the {self._noun()}, unless its {self._noun()} is {self._rng.randrange(1000)}."
            for _ in self._times(sentences)
        )

    def _code(self, lines: int) -> str:
        def line() -> str:
            name, verb = f"{self._noun()}_{self._noun()}", self._rng.choice(_VERBS)
            return f"    {name} = self.{verb}_{self._noun()}({self._rng.randrange(100)})"

        return "\n".join(line() for _ in self._times(lines))


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _thought(text: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _result(call: Json, text: str) -> Json:
    return {"type": "tool_result", "tool_use_id": call["id"], "content": [_text(text)]}


def write_hybrid(folder: Path, **overrides: Any) -> Path:
    """Write a random hybrid with a head of multi-token prediction, the demo's tokenizer and ``TEMPLATE``."""
    write_tiny("qwen3_5_text", folder, **{**_SIZES, **overrides})
    add_head(folder)
    add_chat(folder)
    return folder


def add_chat(folder: Path) -> None:
    """Give a checkpoint the demo's tokenizer, and ``TEMPLATE`` with its two special tokens as marks."""
    source = demo_path("pycoder")
    shutil.copy(source / "tokenizer.json", folder)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    opened, closed = settings["bos_token"], settings["eos_token"]
    settings["chat_template"] = TEMPLATE.replace("OPEN", opened).replace("CLOSE", closed)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(source / "generation_config.json", folder)


_SIZES: Json = {
    "seed": 3,
    "vocab_size": 4096,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 131_072,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}

# As Qwen 3 and later write it: thoughts before the last question are left out, and the prompt opens none.
TEMPLATE = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if messages[0].role == 'system' %}OPENsystem
{{ messages[0].content }}
{% endif %}
{%- if tools %}{% if messages[0].role != 'system' %}OPENsystem
{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}CLOSE
{% elif messages[0].role == 'system' %}CLOSE
{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}OPENassistant
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}CLOSE
{% elif m.role != 'system' %}OPEN{{ m.role }}
{{ m.content }}CLOSE
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}OPENassistant
{% endif %}"""
