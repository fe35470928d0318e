"""Jinja for templates that nobody has read: no access to Python, bounded time and memory."""

from __future__ import annotations

import datetime as dt
import functools
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor
from jinja2.exceptions import SecurityError

MAX_SIZE = 10_000_000  # characters of the prompt, and of any string or list made on the way
_MAX_ITERATIONS = 1_000_000  # of all loops together
_MAX_BITS = 4096  # of an integer
_WIDE_FORMAT = re.compile(r"\d{6,}|\*|\{[^{}]*\{")  # a width of a million, or one taken from an argument

# Filters that pad to a given width or format by a given string; no chat template needs them.
_REMOVED_FILTERS = ("center", "format", "urlize", "wordwrap")
_PADDING_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment with what Hugging Face chat templates expect. Thread-safe.

    Jinja's sandbox keeps the template away from Python; this class also limits the iterations of all loops
    together and the size of what it makes. It is no substitute for limits on the process where users, not
    only checkpoints, may send templates.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        self.filters.update(tojson=_to_json, budgeted=self._budgeted, bounded=_bounded)
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        del self.globals["lipsum"]
        self._budget = threading.local()

    @functools.lru_cache(maxsize=16)  # noqa: B019 -- there is one sandbox, which lives as long as the process
    def compiled(self, source: str) -> jinja2.Template:
        """A template, compiled once."""
        return self.from_string(source)

    def generate(self, source: str, variables: Mapping[str, Any]) -> Iterator[str]:
        """Render piece by piece; the limits hold for each rendering on its own."""
        template = self.compiled(source)
        self._budget.iterations = _MAX_ITERATIONS
        return template.generate(variables)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an intercepted operator if the result stays small."""
        if operator in ("*", "**") and _product_size(operator, left, right) > MAX_SIZE:
            raise SecurityError(f"the result of '{operator}' would be too large")
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("a format with a huge or variable width")
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method if the result stays small."""
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            if name in _PADDING_METHODS and any(isinstance(n, int) and n > MAX_SIZE for n in args):
                raise SecurityError(f"padding by '{name}' to a huge width")
            if name == "replace" and len(args) > 1 and len(owner) * len(str(args[1])) > MAX_SIZE:
                raise SecurityError("the result of 'replace' would be too large")
        return _bounded(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        """Refuse ``str.format`` with a width that would make a huge string."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FORMAT.search(value.__self__):
            raise SecurityError("a format with a huge or variable width")
        return wrapped

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        limited: jinja2.nodes.Template = _Limiter().visit(super()._parse(source, name, filename))
        return limited

    def _budgeted(self, items: Iterable[Any]) -> Iterable[Any]:
        """Charge a loop's items to the budget, at once where they can be counted."""
        if isinstance(items, Sized):
            self._charge(len(items))
            return items
        return self._charging(items)

    def _charging(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._charge(1)
            yield item

    def _charge(self, count: int) -> None:
        self._budget.iterations -= count
        if self._budget.iterations < 0:
            raise SecurityError(f"more than {_MAX_ITERATIONS} loop iterations")


class _Limiter(jinja2.visitor.NodeTransformer):
    """Sends the items of every loop and the result of every `~` through a filter that limits them."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802 -- jinja2's naming
        self.generic_visit(node)
        node.iter = _filter(node.iter, "budgeted")
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, "bounded")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it only has to vanish."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filter(node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_SIZE:
        raise SecurityError(f"a value of more than {MAX_SIZE} characters or items")
    return value


def _product_size(operator: str, left: Any, right: Any) -> float:
    """Items of ``left * right`` where one is a sequence; for integers, infinite if they get too long."""
    for items, count in ((left, right), (right, left)):
        if isinstance(items, str | list | tuple) and isinstance(count, int):
            return len(items) * max(count, 0)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return float("inf") if bits > _MAX_BITS else 0
    return 0


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return dt.datetime.now().astimezone().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON with nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


SANDBOX = TemplateSandbox()
