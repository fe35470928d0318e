"""Generated conversations in which a model repairs a Python file with tools.

A user names a file whose function does not do what its docstring says, and a test. The model reads the
file, replaces the wrong statement by the right one, runs the test and tells what it printed. In other
conversations the file is right, only a test is to be run, only a file to be read, or nothing is asked of the
tools. Paths, names, statements and what tests print vary. ``HELD_OUT`` words appear in no conversation for
training.
"""

import json
import random
import string
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

TURN, END, CALL, END_CALL = MARKERS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{{ bos_token }}"
    "{%- if tools %}{{ '<|im_start|>tools\n' }}{% for t in tools %}{% set f = t.function %}"
    "{{ f.name }}({{ f.parameters.properties | default({}) | join(', ') }}): {{ f.description }}{{ '\n' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content %}{{ m.content }}{% endif %}"
    "{%- for c in m.tool_calls or [] %}{% set f = c.function %}"
    '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>'
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_WORDS = """
    account address album amount angle animal answer archive area arrow article author badge balance
    banner basket batch beacon bottle branch bridge bucket budget button cabin cable camera candle
    canvas carbon castle cell chart circle client clock cloud color column comet copper corner counter
    country course crystal customer cycle delta depth desert device dinner doctor dollar dragon driver
    engine entry error event factor falcon farmer feature fiber field figure filter finger flower folder
    forest format fraction frame friend garden garlic gate glacier goal grain grade graph group guest
    guitar hammer harbor height hockey holiday horizon hotel house image income index insect iron island
    item jacket journal jungle kernel kitchen label ladder lake language lantern layer lemon length
    lesson letter level library light limit line list local lunch machine magnet map margin market
    marble matrix meadow meeting member memory menu metal meter mirror model moment monkey month motor
    mountain museum needle network night noodle number object ocean office onion option orange orbit
    order oven owner packet page paint palace panel paper parcel parent pasta payment pencil pepper
    person phone picture pillow pilot planet plate player pocket point policy pond price printer prize
    profile project pulse pump queue rabbit radar radio rain range rate record region report result
    ribbon river road robot rocket roof room route salad sample sand scale school score season second
    sensor shadow shape sheet shelf ship shoe shop signal silver size sketch sky snow socket song source
    speed spice spring square stage star station steam stock stone store storm story street string
    student style subject sugar summer surface table target task taxi temple tennis theory thread ticket
    tiger time tower track trade train travel treasure tree truck tunnel uncle unit valley value vector
    village violin visitor voice volume wagon wallet water wave weather week weight wheel window winter
    wire wolf word worker yard year zebra
""".split()  # noqa: SIM905 -- 300 words as a list literal take 300 lines
HELD_OUT = tuple(word for word in _WORDS if zlib.crc32(word.encode()) % 4 == 0)
_TRAINED = tuple(word for word in _WORDS if word not in HELD_OUT)

# What functions return, in words and as an expression; a wrong one is another of the same group.
_GROUPS = (
    (
        ("the sum of {a} and {b}", "{a} + {b}"),
        ("the difference of {a} and {b}", "{a} - {b}"),
        ("the product of {a} and {b}", "{a} * {b}"),
        ("the quotient of {a} and {b}", "{a} / {b}"),
    ),
    (
        ("whether {a} is greater than {b}", "{a} > {b}"),
        ("whether {a} is less than {b}", "{a} < {b}"),
        ("whether {a} equals {b}", "{a} == {b}"),
    ),
    (
        ("the larger of {a} and {b}", "max({a}, {b})"),
        ("the smaller of {a} and {b}", "min({a}, {b})"),
    ),
    (
        ("the first item of {a}", "{a}[0]"),
        ("the last item of {a}", "{a}[-1]"),
        ("the number of items in {a}", "len({a})"),
    ),
    (
        ("{a} in upper case", "{a}.upper()"),
        ("{a} in lower case", "{a}.lower()"),
    ),
)
_PARAMETERS = (("a", "b"), ("x", "y"), ("left", "right"), ("first", "second"), ("m", "n"), ("p", "q"))
_REPAIRS = (
    "Repair {file} and run {test}.",
    "The test {test} fails. Repair {file}.",
    "Fix the bug in {file} and run {test}.",
)
_RUNS = ("Run {test}.", "Does {test} pass?")
_READS = ("What is in {file}?", "Read {file}.")
_TALKS = (
    ("Hello", "Hello. Which file shall I repair?"),
    ("Who are you?", "I repair Python files."),
    ("Thanks", "You are welcome."),
)
_SYSTEMS = ("", "", "You repair Python files with tools.")


def _schema(name: str, description: str, *parameters: str) -> Mapping[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    _schema("read_file", "Read a file.", "path"),
    _schema("edit_file", "Replace a text in a file.", "path", "old", "new"),
    _schema("run_test", "Run a test file.", "path"),
)


@dataclass(frozen=True)
class Function:
    """A function of a file.

    Args:
        name: of the function.
        source: its lines.
        written: the statement of the file.
        right: the statement that does what the docstring says.
    """

    name: str
    source: str
    written: str
    right: str


class Writer:
    """Writes conversations.

    Args:
        rng: makes all choices.
        words: of names; None for those of training, and random letters, so that names are copied and not
            remembered.
    """

    def __init__(self, rng: random.Random, words: Sequence[str] | None = None) -> None:
        self._rng, self._words = rng, words

    def name(self) -> str:
        """An identifier of one word."""
        rng = self._rng
        if self._words is not None:
            return rng.choice(self._words)
        if rng.random() < 0.4:
            return rng.choice(_TRAINED)
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8)))

    def function(self, *, right: bool) -> Function:
        """A function that does, or does not, what its docstring says."""
        rng = self._rng
        (phrase, wanted), (_, other) = rng.sample(rng.choice(_GROUPS), 2)
        a, b = rng.choice(_PARAMETERS)
        told, wanted, other = (text.format(a=a, b=b) for text in (phrase, wanted, other))
        name, signature = self.name(), f"{a}, {b}" if "{b}" in phrase else a
        statement = f"return {wanted if right else other}"
        source = f'def {name}({signature}):\n    """Return {told}."""\n    {statement}\n'
        return Function(name, source, statement, f"return {wanted}")

    def paths(self) -> tuple[str, str]:
        """The paths of a file and of its test."""
        name = self.name()
        return self._rng.choice(
            ((f"{name}.py", f"test_{name}.py"), (f"src/{name}.py", f"tests/test_{name}.py"))
        )

    def passed(self, file: str) -> str:
        """What the test of a file prints when it passes."""
        name = file.rpartition("/")[2].removesuffix(".py")
        return self._rng.choice((f"{name} is right", f"{self._rng.randint(1, 40)} passed", "OK"))

    def conversation(self) -> list[Message]:
        """The messages of a conversation."""
        rng = self._rng
        kinds: tuple[tuple[Callable[[], Iterator[Message]], int], ...] = (
            (self._repair, 14), (self._run, 2), (self._read, 1), (self._talk, 1),
        )  # fmt: skip
        write = rng.choices([kind for kind, _ in kinds], [share for _, share in kinds])[0]
        system = rng.choice(_SYSTEMS)
        return [*([{"role": "system", "content": system}] if system else []), *write()]

    def _repair(self) -> Iterator[Message]:
        rng = self._rng
        file, test = self.paths()
        function = self.function(right=rng.random() < 0.1)
        yield _user(rng.choice(_REPAIRS).format(file=file, test=test))
        yield _call("read_file", path=file)
        yield _result(function.source)
        if function.written != function.right:
            yield _call("edit_file", path=file, old=function.written, new=function.right)
            yield _result("done")
        yield from self._tested(test, self.passed(file), "passes")

    def _run(self) -> Iterator[Message]:
        file, test = self.paths()
        yield _user(self._rng.choice(_RUNS).format(test=test))
        failed = f"AssertionError: {self.name()} is {self._rng.randint(-9, 99)}"
        out, how = self._rng.choice(((failed, "fails"), (self.passed(file), "passes")))
        yield from self._tested(test, out, how)

    def _tested(self, test: str, out: str, how: str) -> Iterator[Message]:
        yield _call("run_test", path=test)
        yield _result(out)
        yield _answer(f"The test {how}: {out}")

    def _read(self) -> Iterator[Message]:
        file, _ = self.paths()
        function = self.function(right=self._rng.random() < 0.5)
        yield _user(self._rng.choice(_READS).format(file=file))
        yield _call("read_file", path=file)
        yield _result(function.source)
        yield _answer(f"It has {function.name}.")

    def _talk(self) -> Iterator[Message]:
        asked, said = self._rng.choice(_TALKS)
        yield _user(asked)
        yield _answer(said)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _call(name: str, **arguments: str) -> Message:
    call = {"id": "call", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": "call"}


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def rendered(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = TOOLS
) -> list[tuple[str, bool]]:
    """The texts of a conversation as ``TEMPLATE`` writes it, each with whether the model has written it."""
    listed = "".join(
        f"{f['name']}({', '.join(f['parameters']['properties'])}): {f['description']}\n"
        for f in (tool["function"] for tool in tools)
    )
    texts = [(f"{TURN}tools\n{listed}{END}\n", False)] if tools else []
    for message in messages:
        text = message["content"]
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"])
            text += f'{CALL}{{"name": "{name}", "arguments": {arguments}}}{END_CALL}'
        own = message["role"] == "assistant"
        texts += [(f"{TURN}{message['role']}\n", False), (f"{text}{END}", own), ("\n", False)]
    return texts
