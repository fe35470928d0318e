"""Chat templates: render messages to the prompt text."""

from __future__ import annotations

import contextlib
import functools
import keyword
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ChatTemplateError, PackageError, PromptTooLongError
from ...options import shown
from ...storage.texts import read_text
from .tokenizer import read_optional_json
from .tool_messages import as_text, text_of

Message = Mapping[str, Any]

_log = logging.getLogger(__name__)

_MAX_SOURCE = 1_000_000
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_END = "<carryall:continue>"  # marks the place in the prompt where a message is continued
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}

# Exceptions that a template's expressions may raise on unexpected content.
_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """The chat templates of one checkpoint, rendered in a sandbox, since checkpoints are not trusted.

    Args:
        templates: Jinja source by name: ``default``, and ``tool_use`` for conversations with tools.
        special_tokens: texts by role, such as ``bos_token``.
        tool_prompt: describe tools in a message if a template has no place for them.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], *, tool_prompt: bool = True
    ) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._tool_prompt = tool_prompt
        self._told = False

    @classmethod
    def from_folder(
        cls, folder: Path, special_tokens: Mapping[str, str], *, tool_prompt: bool = True
    ) -> ChatTemplate:
        """Read ``chat_template.jinja``, else ``chat_template.json``, else ``tokenizer_config.json``."""
        return cls(_read_templates(folder), special_tokens, tool_prompt=tool_prompt)

    @classmethod
    def from_file(
        cls, path: Path, special_tokens: Mapping[str, str], *, tool_prompt: bool = True
    ) -> ChatTemplate:
        """Read one template from a file, for conversations with and without tools.

        Raises:
            UsageError: the file cannot be read, or is not UTF-8 text.
        """
        return cls({_DEFAULT: read_text(path)}, special_tokens, tool_prompt=tool_prompt)

    @property
    def names(self) -> list[str]:
        """The names of the templates, sorted."""
        return sorted(self._templates)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        max_size: int | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a conversation, including its special tokens.

        Args:
            messages: objects with ``role`` and ``content``, in order.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: append the header of the assistant's answer.
            continue_final_message: end the prompt within the last message, one of the assistant, so that the
                model continues it; no header is appended.
            template: the name of another template, or Jinja source.
            max_size: maximum number of characters of the prompt; None and larger numbers take the limit of
                ``template_budget``.
            variables: further variables of the template, such as ``enable_thinking``.

        Raises:
            ChatTemplateError: there is no such template, it fails or tries something forbidden, or the last
                message cannot be continued.
            PromptTooLongError: the prompt has more than ``max_size`` characters.
        """
        source = self.source(template, with_tools=bool(tools))
        plain = [_plain(message) for message in messages]
        if continue_final_message:
            plain = _marked(plain)
        if "tools" not in source:
            self._tell(tools)
        if self.describes_tools(source):
            plain = as_text(plain, tools or (), system=_takes_system(source))
        plain = _in_form(source, plain)
        context = {
            **self._special_tokens,
            **variables,
            "messages": plain,
            "tools": [dict(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = _render(source, context, max_size)
        return _up_to_mark(text) if continue_final_message else text

    def _tell(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Log once that a template has no place for the tools of requests."""
        if not tools or self._told:
            return
        self._told = True
        if self._tool_prompt:
            _log.info("the chat template has no place for tools: a message describes those of requests")
        else:
            _log.warning(
                "the chat template has no place for tools, and tool_prompt is off: the model does not see "
                "those of requests, and calls one only if tool_choice demands it"
            )

    def describes_tools(self, source: str) -> bool:
        """Return whether a message describes tools, since a template has no place for them.

        Args:
            source: the template's text.
        """
        return self._tool_prompt and "tools" not in source

    def source(self, template: str | None, *, with_tools: bool) -> str:
        """Return the source of a template by its name; Jinja source is returned as it is.

        Raises:
            ChatTemplateError: there is no such template.
        """
        if template is not None and template not in self._templates:
            if "{" in template:
                return template
            raise ChatTemplateError(f"there is no chat template '{template}'; choose one of {self.names}")
        if template is None:
            template = _WITH_TOOLS if with_tools and _WITH_TOOLS in self._templates else _DEFAULT
        if template not in self._templates:
            known = f"; choose one of {self.names}" if self._templates else ""
            raise ChatTemplateError(
                f"this model has no chat template{known}. Give one as a file (--chat-template, "
                "chat_template=), or continue a prompt in the model's own format (carryall run, generate)"
            )
        return self._templates[template]


def _render(source: str, variables: Mapping[str, Any], max_size: int | None) -> str:
    import jinja2  # models that only continue text start faster without it

    from .template_budget import MAX_SIZE
    from .template_sandbox import SANDBOX

    most = MAX_SIZE if max_size is None else min(max_size, MAX_SIZE)
    if len(source) > _MAX_SOURCE:
        raise ChatTemplateError(f"the chat template has {len(source)} characters, more than {_MAX_SOURCE}")
    pieces: list[str] = []
    size = 0
    try:
        for piece in SANDBOX.generate(source, variables):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise PromptTooLongError(
                    f"the chat template writes more than {most} characters of it, the limit for this context"
                )
    except jinja2.exceptions.SecurityError as error:
        raise ChatTemplateError(f"the chat template tried something forbidden: {error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"syntax error in line {error.lineno} of the chat template: {error}"
        ) from error
    except SyntaxError as error:  # of the Python code that Jinja makes of the template
        raise ChatTemplateError(f"the chat template cannot be compiled: {error.msg}") from error
    except (jinja2.TemplateError, *_FAULTS) as error:
        raise ChatTemplateError(f"the chat template refuses this conversation: {error}") from error
    return "".join(pieces)


@functools.lru_cache(maxsize=16)
def _takes_system(source: str) -> bool:
    """Return whether a template writes system messages; some refuse them, and some leave them out."""
    mark = "carryall-system"
    talk = [{"role": "system", "content": mark}, {"role": "user", "content": "hello"}]
    return mark in _tried(source, _in_form(source, talk))


@functools.lru_cache(maxsize=16)
def _content_forms(source: str) -> tuple[bool, bool]:
    """Return whether a template writes contents that are texts, and those that are lists of parts.

    Some write only lists, as those of SmolVLM do; others fail on a list, or write how Python prints it, which
    puts the text in quotes.
    """
    mark = "carryall-user"
    text = _tried(source, [{"role": "user", "content": mark}])
    listed = _tried(source, [{"role": "user", "content": [{"type": "text", "text": mark}]}])
    quoted = f"'{mark}'" in listed or f'"{mark}"' in listed
    return mark in text, mark in listed and not quoted


def _tried(source: str, messages: Sequence[Message]) -> str:
    """Return what a template writes for messages, without special tokens; "" if it refuses them.

    Templates of conversations with tools fail without any.
    """
    tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
    for tools in (None, [_TOOL]):
        given = {**tokens, "messages": messages, "tools": tools, "add_generation_prompt": True}
        with contextlib.suppress(ChatTemplateError):
            return _render(source, given, None)
    return ""


def _in_form(source: str, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages whose contents have the form that a template writes.

    A list of texts becomes one text if the template writes texts only. So it does in other messages than the
    user's, where few templates that write lists do.
    """
    texts, lists = _content_forms(source)
    changed = []
    for message in messages:
        if not texts:
            changed.append(_in_parts(message) if lists else dict(message))
        elif lists and message.get("role") == "user":
            changed.append(dict(message))
        else:
            changed.append(_in_one_text(message))
    return changed


def _in_parts(message: Message) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return dict(message)
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


def _in_one_text(message: Message) -> dict[str, Any]:
    content = message.get("content")
    texts = [text_of(part) for part in content] if isinstance(content, list | tuple) else [None]
    if None in texts:
        return dict(message)
    return {**message, "content": "".join(map(str, texts))}


def check_variables(variables: Mapping[str, Any], reserved: Collection[str]) -> None:
    """Check the names of template variables that a request sets.

    Args:
        variables: variables of the request, such as ``enable_thinking``.
        reserved: names of parameters that the request must not set in this way.

    Raises:
        ChatTemplateError: a name is not an identifier, or is reserved.
    """
    if not variables:
        return
    from .template_sandbox import SANDBOX

    for name in variables:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise ChatTemplateError(f"{name!r} cannot be a chat template variable: it is not an identifier")
        if name in reserved or name in SANDBOX.globals or name.startswith("_"):
            raise ChatTemplateError(f"'{name}' cannot be a chat template variable: the name is reserved")


def _plain(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise ChatTemplateError(f"a message must be an object with 'role' and 'content', not {message!r}")
    return dict(message)


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with a mark at the end of the last one."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if last.get("role") != "assistant" or not isinstance(content, str) or last.get("tool_calls"):
        raise ChatTemplateError(
            "only a last message of the assistant with text and without tool calls can be continued"
        )
    return [*messages[:-1], {**last, "content": content + _END}]


def _up_to_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_END)
    if not mark:
        raise ChatTemplateError(
            "the chat template leaves out the end of the last message: nothing to continue"
        )
    return before


def _named(entry: object, path: Path) -> tuple[str, str]:
    """One of several templates: an object with a ``name`` and a ``template``."""
    name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(source, str):
        raise PackageError(f"{path}: a chat template of several needs a name and a text, not {shown(entry)}")
    return name, source


def _read_templates(folder: Path) -> dict[str, str]:
    templates: dict[str, str] = {}
    for path in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        entry = read_optional_json(path).get("chat_template")
        if isinstance(entry, str):
            templates[_DEFAULT] = entry
        elif isinstance(entry, list):
            templates.update(_named(item, path) for item in entry)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path, PackageError)
    if (folder / "chat_template.jinja").is_file():
        templates[_DEFAULT] = read_text(folder / "chat_template.jinja", PackageError)
    return templates
