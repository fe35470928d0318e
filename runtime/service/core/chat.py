"""Conversations in one form for all APIs: messages of typed parts, tools, and the choice among tools.

The files of the APIs rename fields. What a part, a tool, a ``tool_choice`` or an answer to continue may be is
decided here, and so is what becomes of a part that the model cannot read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import field, replace
from typing import Any, Literal

from ....errors import RequestError
from ....options import shown
from ....records import dataclass
from ...images.data_url import is_data_url, read_base64, read_data_url
from ...images.sizes import stated_sizes

Json = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MOST_SHOWN = 200  # characters of a value in an error message


@dataclass(frozen=True, slots=True)
class Text:
    """A text."""

    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """An image, by its bytes or by its address.

    Args:
        data: the bytes of the file; empty if ``url`` tells where it is.
        media_type: such as ``image/png``; empty if the request does not tell.
        url: an address, never a ``data:`` one, which is read to ``data``.
        sizes: what the request says of the size in which the model sees it; see ``stated_sizes``.
    """

    data: bytes = field(default=b"", repr=False)
    media_type: str = ""
    url: str = ""
    sizes: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """A video, by its frames.

    Args:
        frames: images, by their bytes or addresses.
        fps: frames of a second, as the request says it; None if it does not.
    """

    frames: tuple[Image, ...]
    fps: Any = None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A thought of the assistant."""

    text: str


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a function by the assistant.

    Args:
        name: the function.
        arguments: an object, or the text that was given instead of one.
        id: empty if the API has none.
    """

    name: str
    arguments: Any
    id: str = ""


@dataclass(frozen=True, slots=True)
class FunctionResult:
    """What a function gave.

    Args:
        parts: texts and images.
        id: of the call; empty if the API has none.
        name: of the function; empty if the API does not tell.
    """

    parts: tuple[Text | Image, ...]
    id: str = ""
    name: str = ""


Part = Text | Image | VideoFrames | Reasoning | FunctionCall | FunctionResult


def image_part(image: Image) -> Json:
    """Return an image as a part of a content, as ``LLM.chat`` takes it."""
    if image.url:
        return {"type": "image_url", "image_url": {"url": image.url}, **image.sizes}
    return {"type": "image", "image": image.data, **image.sizes}


def _video_part(video: VideoFrames) -> Json:
    """Return a video as a part of a content, as ``LLM.chat`` takes it."""
    return {"type": "video", "video": [image_part(frame) for frame in video.frames], "fps": video.fps}


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Args:
        role: one of ``ROLES`` except ``developer``, which templates know as ``system``.
        parts: the content, in order.
        fields: further fields that a chat template may read, such as ``name``.
    """

    role: str
    parts: tuple[Part, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def calls(self) -> list[FunctionCall]:
        """Return the calls of the message."""
        return [part for part in self.parts if isinstance(part, FunctionCall)]

    def images(self) -> Iterator[Image]:
        """Yield the images of the message, frames of videos and those of results included."""
        for part in self.parts:
            match part:
                case Image():
                    yield part
                case VideoFrames(frames):
                    yield from frames
                case FunctionResult(parts):
                    yield from (inner for inner in parts if isinstance(inner, Image))

    def with_images(self, change: Callable[[Image], Image]) -> Message:
        """Return the message with other images; see ``images``."""

        def changed(part: Any) -> Any:
            match part:
                case Image():
                    return change(part)
                case VideoFrames(frames):
                    return dataclasses.replace(part, frames=tuple(map(change, frames)))
                case FunctionResult(parts):
                    return dataclasses.replace(part, parts=tuple(map(changed, parts)))
            return part

        return dataclasses.replace(self, parts=tuple(map(changed, self.parts)))

    def require_text(self) -> None:
        """Check that no part is an image, for a prompt that no template renders.

        Raises:
            RequestError: one is.
        """
        for part in self.parts:
            if isinstance(part, VideoFrames):
                raise RequestError(
                    "a raw prompt is text, and takes no videos; leave them out, or send messages"
                )
            if isinstance(part, Image):
                what = part.media_type or ("an address" if part.url else "bytes")
                raise RequestError(
                    f"a raw prompt is text, and takes no images (one is given as {what}); leave them out, "
                    "or send messages"
                )

    def turns(self, show: Callable[[Image], str | Json] = image_part) -> Iterator[Json]:
        """Yield the messages for a chat template; each result of a function is one of its own.

        Args:
            show: returns the text, or the part of a content, that stands for an image.
        """
        texts: list[str | Json] = []
        thoughts, calls, results = [], [], 0
        for part in self.parts:
            match part:
                case Text(text):
                    texts.append(text)
                case Image():
                    texts.append(show(part))
                case VideoFrames():
                    texts.append(_video_part(part))
                case Reasoning(text):
                    thoughts.append(text)
                case FunctionCall():
                    calls.append(_call_turn(part))
                case FunctionResult():
                    results += 1
                    yield {**self.fields, **_result_turn(part, show)}
        if results and not (texts or thoughts or calls):
            return
        turn: Json = {**self.fields, "role": self.role, "content": _content(texts)}
        if thoughts:
            turn["reasoning_content"] = "".join(thoughts)
        if calls:
            turn["tool_calls"] = calls
        yield turn


def _content(texts: Sequence[str | Json]) -> str | list[Json]:
    """Return texts as one; with images, a list of parts."""
    plain = [text for text in texts if isinstance(text, str)]
    if len(plain) == len(texts):
        return "".join(plain)
    return [{"type": "text", "text": text} if isinstance(text, str) else text for text in texts]


def _call_turn(call: FunctionCall) -> Json:
    call_turn: Json = {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    return {"id": call.id, **call_turn} if call.id else call_turn


def _result_turn(result: FunctionResult, show: Callable[[Image], str | Json]) -> Json:
    texts = [part.text if isinstance(part, Text) else show(part) for part in result.parts]
    turn: Json = {"role": "tool", "content": _content(texts)}
    if result.id:
        turn["tool_call_id"] = result.id
    if result.name:
        turn["name"] = result.name
    return turn


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """How a client named a tool that the model sees as a function.

    Args:
        name: the client's name, which is another one where two namespaces have functions of one name.
        custom: the function stands for a tool whose input is one text.
        namespace: the namespace that the function is of; empty for none.
    """

    name: str
    custom: bool = False
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation for the model's chat template.

    Args:
        messages: the messages, in order.
        tools: the functions that the model may call, in the form of chat templates.
        variables: further variables of the template.
        called: the names of tools; if there are any, the answer consists of calls of them.
        parallel_calls: whether an answer may hold more than one tool call.
        continues: whether the answer continues the last message, which is one of the assistant.
        left_out: what a request has that no model here can use, such as ``tools.web_search``.
        origins: by name of the function, for tools that a client does not know as functions.
    """

    messages: Sequence[Message]
    tools: Sequence[Json] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    called: tuple[str, ...] = ()
    parallel_calls: bool = True
    continues: bool = False
    left_out: tuple[str, ...] = ()
    origins: Mapping[str, ToolOrigin] = field(default_factory=dict)

    def images(self) -> Iterator[Image]:
        """Yield the images of all messages; see ``Message.images``."""
        for message in self.messages:
            yield from message.images()

    def with_images(self, change: Callable[[Image], Image]) -> Conversation:
        """Return the conversation with other images; see ``Message.images``."""
        return dataclasses.replace(self, messages=[each.with_images(change) for each in self.messages])

    def turns(self, show: Callable[[Image], str | Json] = image_part) -> list[Json]:
        """Return the messages for the chat template; see ``Message.turns``."""
        return [turn for message in self.messages for turn in message.turns(show)]


# --- messages


def read_role(role: Any) -> str:
    """Return a role as chat templates know it.

    A role reaches the text around a message, so a free one could hold the template's own markers.

    Raises:
        RequestError: it is no role.
    """
    if role not in ROLES:
        raise RequestError(f"the 'role' of a message must be one of {', '.join(ROLES)}, not {_short(role)}")
    return {"developer": "system", "function": "tool"}.get(role, str(role))


# Fields of messages that become parts, or that say nothing to a model.
_READ = {"role", "content", "tool_calls", "function_call", "tool_call_id", "tool_name", "reasoning_content",
         "thinking", "images", "refusal", "annotations", "audio"}  # fmt: skip


def read_message(message: Any) -> Message:
    """Return a message in the form of OpenAI's chats, with the fields of Ollama and Anthropic.

    Raises:
        RequestError: the role is missing or unknown, or the content is of a kind that is not supported.
    """
    match message:  # as most messages are
        case {"role": ("system" | "user" | "assistant") as plain, "content": str(text)} if len(message) == 2:
            return Message(plain, (Text(text),) if text else ())
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError("each message must be an object with the strings 'role' and 'content'")
    role = read_role(message["role"])
    parts: list[Part] = []
    for name in ("reasoning_content", "thinking"):
        if isinstance(thought := message.get(name), str) and thought:
            parts.append(Reasoning(thought))
    calls = [_past_call(call) for call in objects("tool_calls", message.get("tool_calls") or [])]
    if isinstance(message.get("function_call"), dict):
        calls.append(_past_call({"function": message["function_call"]}))
    content = message.get("content")
    if content is None and isinstance(message.get("refusal"), str):
        content = message["refusal"]
    if content is None and calls:
        content = ""
    images = message.get("images") or []
    if not isinstance(images, list):
        raise RequestError(f"'images' must be a list of base64 texts, not {_short(images)}")
    parts += map(_base64_image, images)
    parts += read_parts(content, "each message must be an object with the strings 'role' and 'content'")
    fields = {name: value for name, value in message.items() if name not in _READ}
    if role == "tool":
        name = message.get("tool_name") or message.get("name") or ""
        id_ = message.get("tool_call_id") or ""
        fields.pop("name", None)
        return Message(role, (FunctionResult(_seen(parts), str(id_), str(name)),), fields)
    return Message(role, (*parts, *calls), fields)


def joined(messages: Iterable[Message]) -> Iterator[Message]:
    """Merge consecutive messages of the assistant (reasoning, text, calls) into one for each answer."""
    last: Message | None = None
    for message in messages:
        if last is not None and last.role == message.role == "assistant":
            last = Message("assistant", last.parts + message.parts, {**last.fields, **message.fields})
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def read_parts(content: Any, error: str = "'content' must be a text or a list of parts") -> list[Part]:
    """Return a content, a text or a list of the parts of any API.

    Args:
        content: the value of a field.
        error: the error message for a value of another type.

    Raises:
        RequestError: the value has another type, or a part is malformed or of a kind that is not supported.
    """
    if isinstance(content, str):
        return [Text(content)] if content else []
    if not isinstance(content, list):
        raise RequestError(error)
    return [part for item in content for part in _part(item)]


def _part(part: Any) -> list[Part]:
    match part:
        case str(text):
            return [Text(text)]
        case {"type": "text" | "input_text" | "output_text" | "summary_text", "text": str(text)}:
            return [Text(text)]
        case {"type": "refusal", "refusal": str(text)}:
            return [Text(text)]
        case {"type": "thinking", "thinking": str(text)} | {"type": "reasoning_text", "text": str(text)}:
            return [Reasoning(text)]
        case {"type": "redacted_thinking"}:
            return []
        case {"type": "tool_use" | "server_tool_use", "name": str(name), **rest}:
            return [FunctionCall(name, read_arguments(rest.get("input", {})), str(rest.get("id") or ""))]
        case {"type": str(kind), "tool_use_id": str(id_), **rest} if kind.endswith("tool_result"):
            return [FunctionResult(read_result(rest.get("content") or ""), id_)]
        case {"type": "document", "source": {"type": "base64" | "url"}}:
            return [_image(part)]
        case {"type": "image_url" | "input_image" | "image"}:
            return [replace(_image(part), sizes=stated_sizes(part))]
        case {"type": "file", "file": {**file}} | {"type": "input_file", **file}:
            return [_file({str(name): value for name, value in file.items()})]
        case {"type": "document" | "search_result"}:
            return _document(part)
        case {"type": "video", "video": list(frames), **rest}:
            return [VideoFrames(tuple(map(_frame, frames)), rest.get("fps"))]
        case {"type": "video" | "video_url" | "input_video"}:
            raise RequestError(
                "a video must be {'type': 'video', 'video': [frames as data:image/png;base64,...], "
                "'fps': ...}; the service reads no files of videos"
            )
        case {"type": str(kind)} if kind not in ("text", "input_text", "output_text"):
            raise RequestError(
                f"content of type '{kind[:_MOST_SHOWN]}' is not supported, only texts and images"
            )
    raise RequestError("each part of 'content' must be an object with the strings 'type' and 'text'")


def read_result(content: Any) -> tuple[Text | Image, ...]:
    """Return what a function gave: texts and images; other JSON is its text.

    Raises:
        RequestError: a part is malformed or of a kind that is not supported.
    """
    if not isinstance(content, str | list):
        return (Text(json.dumps(content, ensure_ascii=False)),)
    if isinstance(content, list):
        content = [_hosted_text(part) for part in content]
    return _seen(read_parts(content))


def _seen(parts: Iterable[Part]) -> tuple[Text | Image, ...]:
    """Return what of the parts of a result a model sees.

    Raises:
        RequestError: one is a video.
    """
    kept = []
    for part in parts:
        if isinstance(part, VideoFrames):
            raise RequestError("a result of a function holds no videos; send its frames as images")
        if isinstance(part, Text | Image):
            kept.append(part)
    return tuple(kept)


def _hosted_text(part: Any) -> Any:
    """Return a result of a hosted tool, such as a hit of a search, as a text of JSON."""
    match part:
        case {"type": str(kind)} if kind.endswith("_result") and kind != "search_result":
            return {"type": "text", "text": json.dumps(part, ensure_ascii=False)}
    return part


def _document(part: Mapping[str, Any]) -> list[Part]:
    """Return the text of a document."""
    match part:
        case {"source": {"type": "text", "data": str(text)}}:
            pass
        case {"source": {"type": "content", "content": content}} | {"content": content}:
            text = "".join(part.text for part in read_parts(content) if isinstance(part, Text))
        case _:
            raise RequestError("a document must be given as text, or as a PDF file in base64")
    title = part.get("title")
    return [Text(f"{title}\n\n{text}" if isinstance(title, str) and title else text)]


def _image(part: Mapping[str, Any]) -> Image:
    match part:
        case {"image_url": {"url": str(url)}} | {"image_url": str(url)}:
            return _image_at(url)
        case {"source": {"type": "base64", "data": str(data), **rest}}:
            return Image(read_base64(data), str(rest.get("media_type") or ""))
        case {"source": {"type": "url", "url": str(url)}}:
            return _image_at(url)
    raise RequestError("an image must have an 'image_url' or a 'source' with base64 data or an address")


def _frame(frame: Any) -> Image:
    """Return a frame of a video, an address or a part with an image."""
    if isinstance(frame, str):
        return _image_at(frame)
    if isinstance(frame, dict):
        return _image(frame)
    raise RequestError(f"a frame of a video must be data:image/png;base64,..., not {_short(frame)}")


def _file(file: Mapping[str, Any]) -> Image:
    """Return a file, a picture or a PDF file whose pages are pictures, that is given by its content."""
    match file:
        case {"file_data": str(data)}:
            return _image_at(data) if is_data_url(data) else Image(read_base64(data))
        case {"file_url": str(url)}:
            return _image_at(url)
    raise RequestError(
        "a file must have 'file_data', data:application/pdf;base64,...; files by 'file_id' are not read"
    )


def _image_at(url: str) -> Image:
    if not is_data_url(url):
        return Image(url=url)
    media_type, data = read_data_url(url)
    return Image(data, media_type)


def _base64_image(value: Any) -> Image:
    if not isinstance(value, str):
        raise RequestError(f"each of 'images' must be a base64 text, not {_short(value)}")
    return _image_at(value) if is_data_url(value) else Image(read_base64(value))


def _past_call(call: Json) -> FunctionCall:
    match call:
        case {"function": {"name": str(name), **rest}}:
            return FunctionCall(name, read_arguments(rest.get("arguments", {})), str(call.get("id") or ""))
        case {"type": "custom", "custom": {"name": str(name), **rest}}:
            return FunctionCall(name, {"input": rest.get("input", "")}, str(call.get("id") or ""))
    raise RequestError("each of 'tool_calls' must have a 'function' with a string 'name'")


def read_arguments(arguments: Any) -> Any:
    """Return the arguments of a past call: an object, or the text of what is none.

    Models are cut in the middle of a call and write invalid JSON, and clients send it back with the history.
    An error here would end the conversation for good, so the template gets the text.
    """
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def arguments_object(text: str) -> Json:
    """Return the arguments of a call as the object that some APIs demand.

    Text that is none, such as that of a call that was cut, becomes ``{"arguments": text}``.
    """
    value = read_arguments(text)
    return value if isinstance(value, dict) else {"arguments": text}


def custom_input(text: str) -> str:
    """Return the input of a custom tool from the arguments of the function that stands for it."""
    value = read_arguments(text)
    text_input = value.get("input") if isinstance(value, dict) else None
    return text_input if isinstance(text_input, str) else text


# --- tools


@dataclass(slots=True)
class Tools:
    """The tools of a request.

    Attributes:
        functions: what the model may call, in the form of chat templates.
        origins: see ``Conversation``.
        left_out: the kinds of tools that a service cannot offer, each once.
    """

    functions: list[Json] = field(default_factory=list)
    origins: dict[str, ToolOrigin] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Return the names of the functions."""
        return [tool["function"]["name"] for tool in self.functions]

    def add(self, tool: Json, namespace: str = "") -> None:
        """Add a tool of any API.

        Raises:
            RequestError: it has no name, or its kind is none of a tool.
        """
        kind = tool.get("type")
        match tool:
            case {"type": "namespace", "name": str(name), **rest}:
                for inner in objects("tools", rest.get("tools") or []):
                    self.add(inner, name)
            case {"type": "custom", "custom": {"name": str(name)}}:
                self._add_custom(name, tool["custom"])
            case {"type": "custom", "name": str(name)} if "input_schema" not in tool:
                self._add_custom(name, tool)
            case {"function": {"name": str(name)}} if kind in (None, "function"):
                self._add(tool["function"], ToolOrigin(name, namespace=namespace))
            case {"name": str(name), "input_schema": schema} if kind in (None, "custom"):
                function = {"name": name, "parameters": schema, "description": tool.get("description")}
                self._add(function, ToolOrigin(name, namespace=namespace))
            case {"type": "function", "name": str(name)} if "function" not in tool:
                function = {key: tool.get(key) for key in ("name", "description", "parameters")}
                self._add(function, ToolOrigin(name, namespace=namespace))
            case {"type": str(kind)} if kind not in ("function", "custom", "namespace"):
                if kind not in self.left_out:
                    self.left_out.append(kind)
            case _:
                raise RequestError(
                    "each tool must have a 'name' and its parameters (a 'function' with a string 'name', or "
                    f"an 'input_schema'), not {_short(tool)}"
                )

    def _add_custom(self, name: str, tool: Mapping[str, Any]) -> None:
        """Add a tool whose input is a text, as a function with one string."""
        description = str(tool.get("description") or "")
        match tool.get("format"):
            case {"type": "grammar", "grammar": {"definition": str(rules), **rest}}:
                description += _format_told(rest.get("syntax"), rules)
            case {"type": "grammar", "definition": str(rules), **rest}:
                description += _format_told(rest.get("syntax"), rules)
        parameters = {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        }
        function = {"name": name, "description": description or None, "parameters": parameters}
        self._add(function, ToolOrigin(name, custom=True))

    def _add(self, function: Json, origin: ToolOrigin) -> None:
        taken = bool(origin.namespace) and origin.name in self.names
        name = f"{origin.namespace}__{origin.name}" if taken else origin.name
        declared = {key: value for key, value in function.items() if value is not None} | {"name": name}
        if "parameters" in declared and not isinstance(declared["parameters"], dict):
            raise RequestError(
                f"the parameters of the tool '{name[:_MOST_SHOWN]}' must be a JSON schema, "
                f"not {_short(declared['parameters'])}"
            )
        self.functions.append({"type": "function", "function": declared})
        if origin.custom or origin.namespace:
            self.origins[name] = origin


def _format_told(syntax: Any, rules: str) -> str:
    return f"\n\nThe input is a text of this {syntax or 'lark'} grammar:\n{rules}"


def read_tools(value: Any) -> Tools:
    """Return the tools of a request, of any API; kinds that a service cannot run are left out.

    Raises:
        RequestError: it is no list of objects, or a tool is malformed.
    """
    tools = Tools()
    for tool in objects("tools", value):
        tools.add(tool)
    return tools


# --- choices


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What an answer may call.

    Args:
        mode: ``auto`` leaves it to the model, ``none`` forbids calls, ``required`` demands one.
        names: the only functions that may be called; None allows all.
        single: one function is demanded by its name, so that the answer is one call.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: frozenset[str] | None = None
    single: bool = False


def read_tool_choice(choice: Any, left_out: Sequence[str] = ()) -> ToolChoice:
    """Return a ``tool_choice`` of any API.

    Args:
        choice: the value of the field; None is ``auto``.
        left_out: see ``Tools``; the choice of such a tool leaves it to the model.

    Raises:
        RequestError: it is no choice.
    """
    match choice:
        case None:
            return ToolChoice()
        case ("auto" | "none" | "required") as mode:
            return ToolChoice(mode)
        case {"type": ("auto" | "none") as mode}:
            return ToolChoice(mode)
        case {"type": "any"}:
            return ToolChoice("required")
        case {"type": "function" | "custom", "function": {"name": str(name)}}:
            return ToolChoice("required", frozenset([name]), single=True)
        case {"type": "custom", "custom": {"name": str(name)}}:
            return ToolChoice("required", frozenset([name]), single=True)
        case {"type": "function" | "custom" | "tool", "name": str(name)}:
            return ToolChoice("required", frozenset([name]), single=True)
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)}:
            return _allowed(allowed)
        case {"type": "allowed_tools"}:
            return _allowed(choice)
        case {"type": str(kind)} if kind in left_out:
            return ToolChoice()
    raise RequestError(
        "'tool_choice' must be auto, none, required (any), a function by its name or allowed_tools, "
        f"not {_short(choice)}"
    )


def _allowed(choice: Json) -> ToolChoice:
    tools = objects("tool_choice.tools", choice.get("tools"))
    names = frozenset(_tool_name(tool) for tool in tools if _tool_name(tool))
    mode = choice.get("mode", "auto")
    if not names or mode not in ("auto", "required"):
        raise RequestError(
            f"'tool_choice.tools' must name tools and its 'mode' be auto or required, not {_short(choice)}"
        )
    return ToolChoice(mode, names)


def _tool_name(tool: Json) -> str:
    inner = tool.get("function") or tool.get("custom") or tool
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else ""


# Shares of ``max_tokens`` that a thought may take, for models that do not know the efforts themselves.
_EFFORTS = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95}


def thinking(effort: Any, options: MutableMapping[str, Any]) -> Json:
    """Return the variables of the chat template for a ``reasoning_effort``; ``none`` turns thoughts off.

    Args:
        effort: the value of the field, which templates read too; None is the model's own.
        options: the sampling options, whose ``reasoning_budget`` is set unless the request has one.
    """
    if effort is None:
        return {}
    if effort == "none":
        options.setdefault("reasoning_budget", 0)
        return {"reasoning_effort": effort, "enable_thinking": False}
    most = options.get("max_tokens")
    if isinstance(effort, str) and effort in _EFFORTS and isinstance(most, int):
        options.setdefault("reasoning_budget", max(int(_EFFORTS[effort] * most), 1))
    return {"reasoning_effort": effort}


def converse(
    messages: Sequence[Message],
    options: MutableMapping[str, Any],
    *,
    tools: Tools | None = None,
    choice: ToolChoice = ToolChoice(),  # noqa: B008 -- it is frozen
    variables: Mapping[str, Any] | None = None,
    parallel: bool = True,
    continues: bool | None = False,
    ignored: Iterable[str] = (),
) -> Conversation:
    """Return the conversation of a request.

    A demanded call is held by a grammar in the form of the chat template, after a thought if the model has
    one. It takes ``structured_output`` out of ``options``, which is for an answer of text.

    Args:
        messages: the messages.
        options: the sampling options of the request, which a demanded call changes.
        tools: the tools; None is none.
        choice: among the tools.
        variables: of the chat template.
        parallel: whether an answer may hold several calls.
        continues: whether the answer continues the last message; None tells it from a last message of the
            assistant that has text and no calls.
        ignored: what else of the request is left out; see ``Conversation``.

    Raises:
        RequestError: the choice names no tool of the request, or a message is continued by a demanded call.
    """
    tools = tools or Tools()
    if continues is None:
        continues = _can_continue(messages)
    functions = tools.functions
    if choice.names is not None:
        if not choice.names <= set(tools.names):
            known = ", ".join(sorted(tools.names)) or "none"
            field_name = "'tool_choice'" if choice.single else "'tool_choice.tools'"
            raise RequestError(
                f"{field_name} names {_short(', '.join(sorted(choice.names)))}; "
                f"the request's tools are: {known[:_MOST_SHOWN]}"
            )
        functions = [tool for tool in functions if tool["function"]["name"] in choice.names]
    conversation = Conversation(messages, functions, dict(variables or {}), parallel_calls=parallel,
                        continues=continues, origins=tools.origins,
                        left_out=(*ignored, *(f"tools.{kind}" for kind in tools.left_out)))  # fmt: skip
    if choice.mode == "none":
        return dataclasses.replace(conversation, tools=())
    if choice.mode == "auto":
        return conversation
    if continues:
        raise RequestError(
            "a forced 'tool_choice' and a message of the assistant to continue exclude each other; omit one"
        )
    if not functions:
        raise RequestError("'tool_choice' demands a call, but the request's tools are: none")
    options.pop("structured_output", None)
    return dataclasses.replace(
        conversation,
        tools=tools.functions if choice.single else functions,
        called=tuple(tool["function"]["name"] for tool in functions),
        parallel_calls=parallel and not choice.single,
    )


def _can_continue(messages: Sequence[Message]) -> bool:
    last = messages[-1] if messages else Message("user")
    return last.role == "assistant" and not last.calls and any(isinstance(part, Text) for part in last.parts)


def objects(name: str, value: Any) -> list[Json]:
    """Return a field that must be a list of objects.

    Raises:
        RequestError: the value has another type.
    """
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"'{name}' must be a list of objects")
    return value


def _short(value: Any) -> str:
    return shown(value, _MOST_SHOWN)
