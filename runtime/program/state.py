"""The conversation that a program writes, and its variables."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, Self, overload

from ...errors import UsageError
from ...options import shown
from ..types.outputs import Usage
from .parts import ImageItem, Item, Parts, Place, Turn, parts_of
from .prompts import Cancellation, Model, PlaceAnswer, ProgramCancelledError, Prompt

Json = dict[str, Any]


class Variable:
    """The answer of the model in one place, perhaps still being written."""

    def __init__(self) -> None:
        self.future: Future[PlaceAnswer] = Future()
        self._pieces: list[str] = []
        self._changed = threading.Condition()

    def take(self, piece: str) -> None:
        """Add a piece of the text."""
        with self._changed:
            self._pieces.append(piece)
            self._changed.notify_all()

    def end(self, answer: PlaceAnswer | None, error: BaseException | None = None) -> None:
        """Set the answer, or why there is none."""
        if error is not None:
            self.future.set_exception(error)
        elif answer is not None:
            self.future.set_result(answer)
        with self._changed:
            self._changed.notify_all()

    def pieces(self) -> Iterator[str]:
        """Yield the text as it grows.

        Raises:
            CarryallError: the request failed.
        """
        count, done = 0, False
        while not done:
            with self._changed:
                while len(self._pieces) == count and not self.future.done():
                    self._changed.wait()
                new, done = self._pieces[count:], self.future.done()
            count += len(new)
            yield from new
        if rest := self.future.result().text[len("".join(self._pieces)) :]:
            yield rest


class Execution:
    """The requests of one or several programs: each starts when what is before its place is known.

    Args:
        model: where they run.
        parallel: maximum number of requests in progress.

    Attributes:
        cancelled: whether the programs were cancelled.
        writer: the thread of the function that writes the conversation; None before it runs.
        declared: notified when a place was added, and when the function has ended.
        over: whether the function has ended.
    """

    def __init__(self, model: Model, parallel: int) -> None:
        self.cancelled = Cancellation()
        self.writer: int | None = None
        self.declared = threading.Condition()
        self.over = False
        self._model = model
        self._failing = threading.local()
        self._pool = ThreadPoolExecutor(parallel, "carryall-program")

    def request(self, conversation: Pieces, place: Place, after: Variable | None) -> Variable:
        """Fill a place when ``after``, the last place before it, is filled; return its variable."""
        variable = Variable()

        def start(before: Future[PlaceAnswer] | None = None) -> None:
            error = before.exception() if before is not None else None
            if error is not None:
                self._fail(variable, error)
                return
            try:
                self._pool.submit(self._run, conversation, place, variable)
            except RuntimeError:  # it is shut down
                self._fail(variable, ProgramCancelledError())

        if after is None:
            start()
        else:
            after.future.add_done_callback(start)
        return variable

    def _run(self, conversation: Pieces, place: Place, variable: Variable) -> None:
        try:
            self.cancelled.check()
            prompt = conversation.prompt()
            if place.choices:
                answer = self._model.select(prompt, place, self.cancelled)
            else:
                answer = self._model.generate(prompt, place, variable.take, self.cancelled)
        except BaseException as error:  # noqa: BLE001 -- whoever reads the variable gets it
            self._fail(variable, error)
        else:
            variable.end(answer)

    def _fail(self, variable: Variable, error: BaseException) -> None:
        """Fail a variable and all behind it, one after another: a chain of them may exceed the stack."""
        waiting: deque[Variable] | None = getattr(self._failing, "waiting", None)
        if waiting is not None:  # a call below ends the variable before it
            waiting.append(variable)
            return
        self._failing.waiting = waiting = deque([variable])
        try:
            while waiting:
                waiting.popleft().end(None, error)
        finally:
            del self._failing.waiting

    def close(self, *, cancel: bool) -> None:
        """Wait until no request is in progress; with ``cancel`` end them first."""
        if cancel:
            self.cancelled.set()
        self._pool.shutdown(wait=True)


class Piece(NamedTuple):
    """A part of a conversation. Pieces of one message have the same ``turn``; text without roles has -1."""

    turn: int
    role: str
    item: str | ImageItem | Variable
    call_id: str | None = None


class Pieces(tuple[Piece, ...]):
    """What a conversation holds before a place; its variables are filled when it becomes a prompt."""

    __slots__ = ()

    def prompt(self) -> Prompt:
        """Return the prompt of the place behind them."""
        if not self or self[0].turn < 0:
            return Prompt("".join(_text(piece.item) for piece in self))
        turns: list[list[Piece]] = []
        for piece in self:
            if not turns or turns[-1][0].turn != piece.turn:
                turns.append([])
            turns[-1].append(piece)
        messages = [_message(turn) for turn in turns]
        last = messages[-1]
        if last["role"] == "assistant" and not last["content"] and not last.get("tool_calls"):
            return Prompt(None, messages[:-1])  # the template opens the turn
        return Prompt(None, messages, continues=last["role"] == "assistant")


def _text(item: str | ImageItem | Variable) -> str:
    if isinstance(item, ImageItem):
        raise UsageError("a picture belongs into a message of the user: user(image(...), ...)")
    return item if isinstance(item, str) else item.future.result().text


def _part(item: str | ImageItem | Variable) -> Json:
    if isinstance(item, ImageItem):
        return {"type": "image_url", "image_url": {"url": item.url}}
    return {"type": "text", "text": _text(item)}


def _message(turn: Sequence[Piece]) -> Json:
    role, call_id = turn[0].role, turn[0].call_id
    message: Json = {"role": role}
    if any(isinstance(piece.item, ImageItem) for piece in turn):
        # The empty text that opens a turn is no part: templates write each part with what separates it.
        message["content"] = [_part(piece.item) for piece in turn if piece.item != ""]
    else:
        message["content"] = "".join(_text(piece.item) for piece in turn)
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for piece in turn
        if isinstance(piece.item, Variable)
        for call in piece.item.future.result().tool_calls
    ]
    if calls:
        message["tool_calls"] = calls
    if call_id is not None:
        message["tool_call_id"] = call_id
    return message


class ProgramState:
    """What a program writes: ``s += ...`` adds to it, ``s[name]`` waits for a variable.

    A conversation is a text (``s += "..."``) or a chat (``s += user(...)``), not both. In a chat, texts and
    places outside of a turn belong to the assistant. Adding a place does not wait: its request starts when
    all before it is known, and the program waits where it reads a variable.
    """

    def __init__(self, execution: Execution, defaults: Mapping[str, Any]) -> None:
        self._execution, self._defaults = execution, defaults
        self._pieces: list[Piece] = []
        self._last: Variable | None = None
        self._variables: dict[str, Variable] = {}
        self._requests: list[Variable] = []
        self._children: list[ProgramState] = []

    def __iadd__(self, parts: Parts | str) -> Self:
        self._execution.cancelled.check()
        for item in parts_of(parts).items:
            self._add(item)
        return self

    def __getitem__(self, name: str) -> str:
        return self.answer(name).text

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    def answer(self, name: str) -> PlaceAnswer:
        """Wait for a variable; return all that the model answered.

        Raises:
            UsageError: no place has this name.
            CarryallError: the request failed.
        """
        if name not in self._variables:
            known = ", ".join(self._variables) or "none"
            raise UsageError(f"the program has no variable {shown(name)}; it has: {known}")
        try:
            return self._variables[name].future.result()
        except CancelledError as error:
            raise ProgramCancelledError from error

    @property
    def variables(self) -> dict[str, str]:
        """The texts of all variables; waits for them."""
        return {name: self[name] for name in list(self._variables)}

    def stream(self, name: str) -> Iterator[str]:
        """Yield the text of a variable as the model writes it; wait until the program has come to its place.

        The function itself cannot wait for a place that it would add.

        Raises:
            UsageError: the program ended without a place of this name, or has not come to it.
            CarryallError: the request failed.
        """
        if threading.get_ident() != self._execution.writer:
            with self._execution.declared:
                self._execution.declared.wait_for(lambda: name in self._variables or self._execution.over)
        if name not in self._variables:
            self.answer(name)  # tells which there are
        yield from self._variables[name].pieces()

    def fork(self, count: int) -> Branches:
        """Return ``count`` conversations that go on from here, each on its own.

        They share the KV of what is before them, and their requests run together.

        Raises:
            ProgramCancelledError: the run was cancelled.
            UsageError: the count is not a number of at least 1.
        """
        self._execution.cancelled.check()
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1024:
            raise UsageError(f"fork takes a number of branches from 1 to 1024, not {shown(count)}")
        branches = []
        for _ in range(count):
            branch = ProgramState(self._execution, self._defaults)
            branch._pieces, branch._last = list(self._pieces), self._last
            branch._variables = dict(self._variables)
            branches.append(branch)
        self._children += branches
        return Branches(branches)

    @property
    def text(self) -> str:
        """The whole conversation as a text, or the messages of a chat one below the other; waits for it."""
        prompt = Pieces(self._pieces).prompt()
        if prompt.text is not None:
            return prompt.text
        return "\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)

    @property
    def messages(self) -> list[Json]:
        """The messages of a chat, in OpenAI's form; waits for them.

        Raises:
            UsageError: the conversation is a text.
        """
        prompt = Pieces(self._pieces).prompt()
        if prompt.text is not None:
            raise UsageError("this conversation is a text without messages; begin it with system or user")
        return list(prompt.messages)

    @property
    def usage(self) -> Usage:
        """The tokens of all requests of the conversation and its branches; waits for them.

        ``prompt_tokens - cached_tokens + completion_tokens`` is what the model computed.
        """
        total = [request.future.result().usage for request in self.requests()]
        return Usage(
            sum(usage.prompt_tokens for usage in total),
            sum(usage.completion_tokens for usage in total),
            sum(usage.cached_tokens for usage in total),
            sum(usage.reasoning_tokens for usage in total),
        )

    def requests(self) -> list[Variable]:
        """Return the requests of the conversation and its branches."""
        found, left = list[Variable](), [self]
        while left:  # branches of branches may be deeper than the stack
            state: ProgramState = left.pop()
            found += state._requests
            left += reversed(state._children)
        return found

    def end(self) -> None:
        """Tell that the program adds nothing more, neither here nor to a branch."""
        with self._execution.declared:
            self._execution.over = True
            self._execution.declared.notify_all()

    def _add(self, item: Item) -> None:
        is_chat = bool(self._pieces) and self._pieces[-1].turn >= 0
        turn = self._pieces[-1].turn + 1 if is_chat else 0
        if isinstance(item, Turn):
            if self._pieces and not is_chat:
                raise UsageError("a conversation is a text or a chat: it began with a text without a role")
            self._pieces.append(Piece(turn, item.role, "", item.call_id))
            for inner in item.items:
                self._put(turn, item.role, inner, item.call_id)
        elif not is_chat:
            self._put(-1, "", item)
        elif self._pieces[-1].role == "assistant":
            self._put(self._pieces[-1].turn, "assistant", item)
        else:
            self._pieces.append(Piece(turn, "assistant", ""))
            self._put(turn, "assistant", item)

    def _put(self, turn: int, role: str, item: str | ImageItem | Place, call_id: str | None = None) -> None:
        if not isinstance(item, Place):
            if isinstance(item, ImageItem) and role != "user":
                raise UsageError("a picture belongs into a message of the user: user(image(...), ...)")
            self._pieces.append(Piece(turn, role, item, call_id))
            return
        if turn < 0 and (item.tools or item.template):
            raise UsageError("tools and variables of the chat template need a chat; begin with user(...)")
        place = replace(item, options={**self._defaults, **item.options})
        variable = self._execution.request(Pieces(self._pieces), place, self._last)
        self._last = variable
        self._requests.append(variable)
        self._pieces.append(Piece(turn, role, variable))
        if place.name is not None:
            with self._execution.declared:
                self._variables[place.name] = variable
                self._execution.declared.notify_all()


class Branches(Sequence[ProgramState]):
    """Conversations that go on from the same point: ``+=`` adds to each, ``[name]`` reads one of each."""

    def __init__(self, conversations: Sequence[ProgramState]) -> None:
        self._conversations = list(conversations)

    def __len__(self) -> int:
        return len(self._conversations)

    @overload
    def __getitem__(self, index: int) -> ProgramState: ...
    @overload
    def __getitem__(self, index: slice) -> Branches: ...
    @overload
    def __getitem__(self, index: str) -> list[str]: ...
    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, str):
            return [conversation[index] for conversation in self._conversations]
        found = self._conversations[index]
        return Branches(found) if isinstance(found, list) else found

    def __iadd__(self, parts: Parts | str) -> Self:
        for conversation in self._conversations:
            conversation += parts
        return self

    def join(self) -> dict[str, list[str]]:
        """Wait for all branches; return the variables that all have, each as a list in their order.

        Raises:
            CarryallError: a request failed.
        """
        found = [conversation.variables for conversation in self._conversations]
        return {
            name: [each[name] for each in found] for name in found[0] if all(name in each for each in found)
        }
