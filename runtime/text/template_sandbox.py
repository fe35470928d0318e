"""A Jinja sandbox for untrusted templates: no access to Python, bounded time and memory."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor
from jinja2.exceptions import SecurityError

from .template_budget import CALL, FILTERED, ITERATION, MAX_ITEMS, SLOWLY_FILTERED, Budget
from .template_filters import (
    CHECKED_METHODS,
    CHECKS,
    PLAIN_FILTERS,
    PLAIN_METHODS,
    SLOW_ON_TEXT,
    check_format,
    to_json,
)

_MAX_BITS = 4096  # of an integer
_JINJA_VARIABLES = ("_loop_vars", "_block_vars")
_WIDE_FORMAT = re.compile(r"\d{4,}|\*|\{[^{}]*\{")  # a width of 1,000 or more, or from an argument


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment with the features that Hugging Face chat templates use. Thread-safe.

    Jinja's sandbox denies access to Python. This class also limits the size of every value and the work of a
    rendering: operators, filters, methods, blocks and loops. Only known filters and methods are allowed. If
    users may send templates, limit the memory and time of the process too.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant folding happens while compiling, outside of any budget
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            finalize=self._written,
        )
        known = {
            name: self.filters[name] for name in sorted(PLAIN_FILTERS | set(CHECKS)) if name in self.filters
        }
        self.filters = {name: self._guarded(name, function) for name, function in known.items()}
        own_filters = {
            "tojson": self._to_json,
            "budgeted": self._budgeted,
            "bounded": self._bounded,
            "weighed": self._weighed,
        }
        self.filters.update(own_filters)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        del self.globals["lipsum"]
        self._local = threading.local()

    @functools.lru_cache(maxsize=16)  # noqa: B019 -- there is one sandbox in the process
    def compiled(self, source: str) -> jinja2.Template:
        """Return the compiled template; the last 16 are cached."""
        return self.from_string(source)

    def generate(self, source: str, variables: Mapping[str, Any]) -> Iterator[str]:
        """Yield the rendered text in pieces; each rendering has its own budget."""
        template = self.compiled(source)
        self._local.budget = Budget()
        return template.generate(variables)

    @property
    def _budget(self) -> Budget:
        budget: Budget = self._local.budget
        return budget

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an intercepted operator, if its result is within the limits."""
        if operator in ("*", "**"):
            self._budget.expect(_product_size(operator, left, right))
        if operator == "%" and isinstance(left, str):
            if _WIDE_FORMAT.search(left):
                raise SecurityError("a format with a huge or variable width")
            check_format(self._budget, left, "%", right if isinstance(right, tuple) else [right])
        return self._budget.made(super().call_binop(context, operator, left, right))

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, if it is allowed and its result is within the limits."""
        owner: Any = getattr(obj, "__self__", None)
        name = getattr(obj, "__name__", "")
        kind = next((kind for kind in PLAIN_METHODS if isinstance(owner, kind)), None)
        if kind is not None and name not in PLAIN_METHODS[kind]:
            if kind is not str or name not in CHECKED_METHODS:
                raise SecurityError(f"the method '{name}' of {kind.__name__} is not allowed in templates")
            # Jinja adds the variables of the loop or block around a call; the methods do not see them.
            named = {key: value for key, value in kwargs.items() if key not in _JINJA_VARIABLES}
            CHECKED_METHODS[name](self._budget, owner, *args, **named)
        if kind is str and name in ("split", "rsplit", "splitlines"):
            self._budget.expect(10 * len(owner))  # a short string object takes the memory of 50 characters
        self._budget.charge(CALL)
        return self._budget.made(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        """Refuse ``str.format`` with a width that would make a huge string."""
        if getattr(value, "__name__", "") == "format_map":
            return None  # its values are not visible here, so their size cannot be checked
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        if _WIDE_FORMAT.search(value.__self__):
            raise SecurityError("a format with a huge or variable width")

        def checked(*args: Any, **kwargs: Any) -> Any:
            check_format(self._budget, value.__self__, "{", [*args, *kwargs.values()])
            return self._budget.made(wrapped(*args, **kwargs))

        return checked

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        limited: jinja2.nodes.Template = _Limiter().visit(super()._parse(source, name, filename))
        return limited

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that charges its arguments and its result."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        check = CHECKS.get(name)

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            budget, arguments = self._budget, list(args[first:])
            if name == "join" and arguments and not isinstance(arguments[0], str | list | tuple | dict):
                arguments[0] = budget.listed(arguments[0])
            each = (
                SLOWLY_FILTERED
                if arguments and isinstance(arguments[0], str) and name in SLOW_ON_TEXT
                else FILTERED
            )
            budget.charge(ITERATION + each * sum(map(budget.weigh, (*arguments, *kwargs.values()))))
            if check is not None:
                with contextlib.suppress(TypeError):  # the filter itself gives the better message
                    check(budget, *arguments, **kwargs)
            return budget.made(function(*args[:first], *arguments, **kwargs))

        return guarded

    def _to_json(self, value: Any, *args: Any, **options: Any) -> str:
        return to_json(self._budget, value, *args, **options)

    def _budgeted(self, items: Iterable[Any], literal: int) -> Iterable[Any]:
        return self._budget.iterated(items, literal)

    def _bounded(self, value: Any) -> Any:
        if isinstance(value, list | tuple | dict):
            self._budget.weigh(value)
        return self._budget.made(value)

    def _weighed(self, value: Any) -> Any:
        if isinstance(value, list | tuple | dict):
            self._budget.weigh(value)
        return value

    def _written(self, value: Any) -> Any:
        self._budget.charge(self._budget.weigh(value))
        return value


class _Limiter(jinja2.visitor.NodeTransformer):
    """Wraps expressions that make values without a call or an operator in filters that charge them."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802 -- jinja2's naming
        literal = sum(len(data.data) for data in node.find_all(jinja2.nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _filter(node.iter, "budgeted", jinja2.nodes.Const(literal))
        return node

    def visit_AssignBlock(self, node: jinja2.nodes.AssignBlock) -> jinja2.nodes.AssignBlock:  # noqa: N802
        self.generic_visit(node)
        node.filter = _filter(node.filter, "bounded")
        return node

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filter(node.expr, "weighed")
        for operand in node.ops:
            operand.expr = _filter(operand.expr, "weighed")
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, "bounded") if isinstance(node.arg, jinja2.nodes.Slice) else node

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, "bounded") if node.ctx == "load" else node

    def _limited(self, node: jinja2.nodes.Expr) -> jinja2.nodes.Filter:
        self.generic_visit(node)
        return _filter(node, "bounded")

    visit_Concat = visit_List = visit_Dict = _limited  # noqa: N815


class _GenerationTag(jinja2.ext.Extension):
    """Removes `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filter(node: jinja2.nodes.Node | None, name: str, *args: jinja2.nodes.Expr) -> jinja2.nodes.Filter:
    lineno = node.lineno if node is not None else None
    return jinja2.nodes.Filter(node, name, list(args), [], None, None, lineno=lineno)


def _product_size(operator: str, left: Any, right: Any) -> float:
    """Return the size of ``left * right`` or ``left ** right``; infinite if it is over a limit."""
    for items, count in ((left, right), (right, left)):
        if isinstance(items, str | list | tuple) and isinstance(count, int):
            size = len(items) * max(count, 0)
            return size if isinstance(items, str) or size <= MAX_ITEMS else float("inf")
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return float("inf") if bits > _MAX_BITS else 0
    return 0


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > 100 or re.search(r"\d{2,}", form):  # glibc pads to a width
        raise SecurityError("a date format that is too long or has a width")
    return dt.datetime.now().astimezone().strftime(form)


SANDBOX = TemplateSandbox()
