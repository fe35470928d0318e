"""Make requests from records of tables or JSON lines, with a Jinja template over the columns."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ....errors import RequestError, UsageError
from ....records import dataclass

if TYPE_CHECKING:  # 20 ms of the start of a service
    import jinja2
    import jinja2.sandbox

Kind = Literal["prompt", "chat", "embedding"]

_MAX_CHARACTERS = 16 * 2**20


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """Makes requests from records.

    Args:
        text: Jinja source over the record's columns. None takes the column ``messages``, ``prompt`` or
            ``input`` as the field of the request.
        kind: what the text is: a prompt to continue, a user message, or a text to embed.
        system: Jinja source of the system message, for ``chat``.
        id_column: the column with the custom_id; None takes ``custom_id`` if it exists.
        keep: columns that are copied to the output.
        picture_columns: columns of pictures, which come before the text, for ``chat``.
    """

    text: str | None = None
    kind: Kind = "prompt"
    system: str | None = None
    id_column: str | None = None
    keep: Sequence[str] = ()
    picture_columns: Sequence[str] = ()

    def check(self, columns: Sequence[str]) -> None:
        """Check that a table has the columns that the template needs.

        Raises:
            UsageError: a named column is missing, or there is neither a template nor a column of a prompt.
        """
        named = [(column, "the template") for column in self.named_columns()]
        named += [(column, "--keep") for column in self.keep]
        named += [(column, "--image-column") for column in self.picture_columns]
        named += [(self.id_column, "--id-column")] if self.id_column else []
        for column, who in named:
            if column not in columns:
                raise UsageError(
                    f"{who} names the column '{column}', which the input lacks; it has: {_listed(columns)}"
                )
        if self.text is None and not {"prompt", "messages", "input"} & set(columns):
            raise UsageError(
                f"the input has the columns {_listed(columns)}, none of which is a prompt; give a "
                "template, for example --template 'Summarize: {{ text }}'"
            )

    def named_columns(self) -> list[str]:
        """Return the columns that the templates name, sorted.

        Raises:
            UsageError: a template has a syntax error.
        """
        import jinja2.meta

        names: set[str] = set()
        for source in (self.text, self.system):
            if source is not None:
                try:
                    names |= jinja2.meta.find_undeclared_variables(_environment().parse(source))
                except jinja2.TemplateSyntaxError as error:
                    raise UsageError(
                        f"the template has a syntax error in line {error.lineno}: {error}"
                    ) from error
        return sorted(names)

    def body(self, record: Mapping[str, Any], pictures: Sequence[str] = ()) -> dict[str, Any]:
        """Return the request of a record, with its custom_id.

        Args:
            record: the values by column.
            pictures: of the record, as ``data:`` addresses.

        Raises:
            RequestError: a column is missing, or the template fails.
        """
        body = self._plain_body(record) if self.text is None else self._rendered_body(record, pictures)
        custom_id = self.custom_id(record)
        if custom_id is not None:
            body["custom_id"] = custom_id
        elif self.id_column:
            raise RequestError(f"the record has no column '{self.id_column}' for its custom_id")
        return body

    def custom_id(self, record: Mapping[str, Any]) -> str | None:
        """Return the custom_id of a record; None if it has none."""
        value = record.get(self.id_column or "custom_id")
        return None if value is None else str(value)

    def kept(self, record: Mapping[str, Any]) -> str | None:
        """Return the columns that are copied to the output; None if there are none.

        As JSON with NaN and Infinity, since a table can hold them.
        """
        if not self.keep:
            return None
        return json.dumps({column: record.get(column) for column in self.keep}, ensure_ascii=False)

    def _plain_body(self, record: Mapping[str, Any]) -> dict[str, Any]:
        for name in ("messages", "prompt", "input"):
            value = record.get(name)
            if value is not None:
                is_text = name == "messages" and isinstance(value, str)
                return {name: _from_json(name, value) if is_text else value}
        raise RequestError("the record has neither 'prompt', 'messages' nor 'input'")

    def _rendered_body(self, record: Mapping[str, Any], pictures: Sequence[str]) -> dict[str, Any]:
        text = _render(str(self.text), record)
        if self.kind == "embedding":
            return {"input": text}
        if self.kind == "prompt":
            return {"prompt": text}
        system = [] if self.system is None else [{"role": "system", "content": _render(self.system, record)}]
        seen = [{"type": "image_url", "image_url": {"url": address}} for address in pictures]
        content = [*seen, {"type": "text", "text": text}] if seen else text
        return {"messages": [*system, {"role": "user", "content": content}]}


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    import jinja2.sandbox

    return jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, autoescape=False, keep_trailing_newline=True
    )


@functools.cache
def _compiled(text: str) -> jinja2.Template:
    return _environment().from_string(text)


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(name if name.isprintable() else repr(name) for name in columns)


def _render(source: str, record: Mapping[str, Any]) -> str:
    import jinja2

    try:
        text = _compiled(source).render(record)
    except jinja2.UndefinedError as error:
        raise RequestError(f"the record lacks a column of the template: {error}") from error
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise RequestError(f"the template fails on this record: {error}") from error
    if len(text) > _MAX_CHARACTERS:
        raise RequestError(f"the template gives {len(text)} characters, more than {_MAX_CHARACTERS}")
    return text


def _from_json(name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise RequestError(f"the column '{name}' is not valid JSON: {error}") from error
