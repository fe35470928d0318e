"""No filter, method or construct of a template can make huge values or unbounded work."""

from __future__ import annotations

from typing import Any

import jinja2.filters
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.errors import ChatTemplateError, PromptTooLongError, RequestError
from carryall.runtime.api.requests import RENDER_OPTIONS
from carryall.runtime.text import template_budget
from carryall.runtime.text.chat_template import ChatTemplate
from carryall.runtime.text.template_budget import Budget
from carryall.runtime.text.template_filters import CHECKED_METHODS, CHECKS, PLAIN_FILTERS, PLAIN_METHODS
from carryall.runtime.text.template_sandbox import SANDBOX

MESSAGES = [{"role": "user", "content": "x"}]
REFUSED = {"center", "format", "pprint", "urlize", "wordwrap", "xmlattr"}
# Other names that templates may use.
OWN = {"tojson", "budgeted", "bounded", "weighed"}


def render(source: str) -> str:
    return ChatTemplate({"default": source}, {}).render(MESSAGES)


def refused(source: str) -> str:
    """Render a template; return the message of its error."""
    with pytest.raises((ChatTemplateError, PromptTooLongError)) as caught:
        render(source)
    return str(caught.value)


def test_every_filter_of_jinja_is_allowed_or_refused_by_name() -> None:
    assert set(jinja2.filters.FILTERS) == PLAIN_FILTERS | set(CHECKS) | REFUSED | {"tojson"}
    assert set(SANDBOX.filters) == PLAIN_FILTERS | set(CHECKS) | OWN


# For each filter, arguments that make the largest output from the smallest input.
HUGE = "1000000000000"
ARGUMENTS: dict[str, list[str]] = {
    "batch": [f"({HUGE}, 'x')", "(99999999, 'x')"],
    "slice": [f"({HUGE}, 'x')", "(99999999, 'x')"],
    "indent": [f"({HUGE})", "('y' * 9000000, true)", f"(width={HUGE}, first=true)"],
    "join": ["(('y' * 1000000))"],
    "replace": ["('a', 'b' * 1000000)", "('', 'b' * 1000000)", "(old='a', new='b' * 1000000)"],
    "round": [f"({HUGE})", "(999999999, 'ceil')"],
    "sum": ["(start=[])", "(start='')"],
    "truncate": [f"({HUGE})"],
    "tojson": [f"(indent={HUGE})", "(indent=101)", "(indent='y' * 9000000)"],
    "map": [f"('batch', {HUGE}, 'x') | list", "('replace', 'a', 'b' * 1000000) | list"],
    "default": ["('y' * 10000000000)"],
    "list": [""],
}
VALUES = {
    "batch": "[1]",
    "slice": "[1]",
    "indent": "'a\\n' * 1000",
    "join": "range(1000)",
    "replace": "'a' * 1000",
    "round": "1.5",
    "sum": "[[1], [2]]",
    "truncate": "'a'",
    "tojson": "[[[[1]]]]",
    "map": "[['aaaaaaaaaaaaaaa']]",
    "list": "'a' * 2000000",
}


@pytest.mark.parametrize(
    ("name", "arguments"), [(name, one) for name, several in ARGUMENTS.items() for one in several]
)
def test_filters_with_huge_arguments(name: str, arguments: str) -> None:
    refused(f"{{{{ ({VALUES.get(name, 'undefined_name')}) | {name}{arguments} }}}}")


def doubled(times: int) -> str:
    """Return a template of a list whose text doubles with every step."""
    return "{% set ns = namespace(x=['aaaa']) %}" + "{% set ns.x = [ns.x, ns.x] %}" * times


NESTED = st.recursive(
    st.none() | st.integers(0, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


@given(NESTED, st.booleans())
def test_values_weigh_what_their_text_does(value: Any, twice: bool) -> None:
    def weight(element: Any) -> int:
        if isinstance(element, str):
            return len(element) + 4
        if isinstance(element, dict):
            return 2 + sum(map(weight, [*element, *element.values()]))
        return 2 + sum(map(weight, element)) if isinstance(element, list | tuple) else 32

    value = [value, value, {"a": value}.items()] if twice else [value]
    expected = weight([value[0], value[1], [("a", value[0])]] if twice else value)
    assert Budget().weigh(value) == expected


def test_a_value_that_holds_itself_is_refused() -> None:
    assert "holds itself" in refused("{% set ns = namespace() %}{% set ns.x = [[ns]] %}{{ ns | string }}")


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(SANDBOX.filters) - OWN | {"tojson"}))
def test_every_filter_on_lists_that_hold_themselves_twice(name: str) -> None:
    arguments = {
        "attr": "('x')",
        "batch": "(2)",
        "groupby": "(0)",
        "map": "('string') | list",
        "replace": "('a', 'b')",
        "slice": "(2)",
        "select": "('equalto', ns.x) | list",
        "reject": "('equalto', ns.x) | list",
        "selectattr": "(0, 'equalto', ns.x) | list",
        "rejectattr": "(0, 'equalto', ns.x) | list",
    }.get(name, "")
    assert "more than" in refused(f"{doubled(60)}{{{{ ns.x | {name}{arguments} }}}}")


@pytest.fixture
def less_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the work: what exceeds it without a limit would take hours."""
    monkeypatch.setattr(template_budget, "UNITS", template_budget.UNITS // 8)


@pytest.mark.usefixtures("less_work")
@pytest.mark.parametrize("name", sorted(set(SANDBOX.filters) - OWN | {"tojson"}))
def test_every_filter_in_a_loop_over_a_large_text(name: str) -> None:
    """Each filter gets a text of a million characters repeatedly: the work of a rendering is bounded."""
    arguments = {"replace": "('a', 'b')", "map": "('upper')", "attr": "('x')"}.get(name, "")
    refused(
        "{% set x = 'a b' * 100000 %}{% set ns = namespace(all=[]) %}{% for i in range(99999) %}"
        f"{{% set y = x | {name}{arguments} %}}{{% set ns.all = ns.all + [y] %}}{{% endfor %}}"
    )


@pytest.mark.parametrize(
    "method",
    sorted(
        {f"str.{name}" for name in dir(str) if not name.startswith("_")}
        | {f"int.{name}" for name in dir(int) if not name.startswith("_")}
        | {f"list.{name}" for name in dir(list) if not name.startswith("_")}
        | {f"dict.{name}" for name in dir(dict) if not name.startswith("_")}
        | {f"tuple.{name}" for name in dir(tuple) if not name.startswith("_")}
    ),
)
def test_every_method_is_allowed_checked_or_refused(method: str) -> None:
    kind, name = method.split(".")
    value = {"str": "'a'", "int": "(5)", "list": "[1]", "dict": "{'a': 1}", "tuple": "(1, 2)"}[kind]
    types: dict[str, type] = {"str": str, "int": int, "list": list, "dict": dict, "tuple": tuple}
    known = name in PLAIN_METHODS[types[kind]] or (kind == "str" and name in CHECKED_METHODS)
    if not known:
        data = not callable(getattr(types[kind](), name))  # such as int.real
        if data:
            render(f"{{{{ {value}.{name} }}}}")
        else:
            refused(f"{{{{ {value}.{name}() }}}}")


@pytest.mark.long
@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.center(10**10) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a'.rjust(99999999) }}",
        "{{ ('\t' * 1000).expandtabs(10**6) }}",
        "{{ 'a'.encode().ljust(10**10) }}",
        "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) }}",
        "{{ (5).to_bytes(10**10, 'big') }}",
        "{{ ('y' * 10**6).join('a' * 1000) }}",
        "{{ ('y' * 10**6).join(range(1000) | map('string')) }}",
        "{{ ('{0}' * 10**5).format('a' * 10**6) }}",
        "{{ ('{a}' * 10**5).format(a='a' * 10**6) }}",
        "{{ ('{a}').format_map({'a': 1}) }}",
        "{% set f = ('{0}' * 10**5).format %}{{ f('a' * 10**6) }}",
        "{{ ('{0}' * 10**5) | attr('format') }}{{ (('{0}' * 10**5) | attr('format'))('a' * 10**6) }}",
        "{{ ('%s' * 10**5) % (('a' * 10**3,) * 10**5) }}",
        "{{ '%99999d' % 1 }}",
        "{{ '%.99999f' % 1 }}",
        "{% for i in range(9999) %}" + "{{ '%999d' % 1 }}" * 10 + "{% endfor %}",
        "{{ strftime_now('%99999999Y') }}",
        "{{ strftime_now('%Y' * 10**6) }}",
        "{% set ns = namespace(x='aaa') %}"
        + "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}" * 60,
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='a') %}"
        + "{% set ns.x = m(ns.x) %}" * 60,
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% set x %}{% for i in range(99999) %}" + "a" * 100_000 + "{% endfor %}{% endset %}",
        "{% filter upper %}{% for i in range(99999) %}" + "a" * 100_000 + "{% endfor %}{% endfilter %}",
        "{% set s = 'a' * 9000000 %}{% set ns = namespace(x=[]) %}"
        "{% for i in range(9999) %}{% set ns.x = ns.x + [s[i:]] %}{% endfor %}",
        doubled(60) + "{{ ns.x }}",
        doubled(60) + "{{ ns }}",
        doubled(60) + "{{ ns.x ~ '' }}",
        doubled(60) + "{{ '%s' % ns.x }}",
        doubled(60) + "{{ '{}'.format(ns.x) }}",
        doubled(60) + "{% set a = ns.x %}" + doubled(60) + "{{ a == ns.x }}",
        "{% set ns = namespace(x={'a': 'aaaa'}) %}"
        + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}" * 60
        + "{{ ns.x.values() }}",
        "{{ [[1] * 1000000] * 1000000 }}",
        "{{ ('f' * 9999999) | int(base=16) }}",
        "{% for x in messages | budgeted(-999999999) %}{% endfor %}{% for i in range(99999) %}"
        "{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ],
)  # fmt: skip
@pytest.mark.usefixtures("less_work")
def test_other_ways_to_large_values(source: str) -> None:
    refused(source)


def test_features_that_chat_templates_use_are_allowed() -> None:
    source = (
        "{{ messages | map(attribute='content') | join(', ') }}|{{ ['b', 'a'] | sort | first }}|"
        "{{ 'a-b'.split('-')[1] }}|{{ {'a': [1, 2]} | tojson(indent=2) | length }}|"
        "{{ 'x' | indent(4, true) }}|"
        "{{ '%s-%02d' % ('a', 3) }}|{{ 'a {} {b}'.format(1, b=2) }}|{{ 'abc'[::-1] }}|{{ 'x'.ljust(3) }}.|"
        "{{ {'a': 1}.items() | list }}|{{ messages[0].get('content', '').strip() }}|{{ 3.14159 | round(2) }}|"
        "{% set x %}t{{ 1 + 1 }}{% endset %}{{ x }}|{{ 'aXb'.replace('X', '-') }}|"
        "{{ ', '.join(['1', '2']) }}|"
        "{% for k, v in {'a': 1} | dictsort %}{{ k }}={{ v }}{% endfor %}|{{ [1, 2, 3] | batch(2) | list }}"
    )
    assert render(source) == (
        "x|a|b|29|    x|a-03|a 1 2|cba|x  .|[('a', 1)]|x|3.14|t2|a-b|1, 2|a=1|[[1, 2], [3]]"
    )


def test_a_long_conversation_renders() -> None:
    messages = [{"role": "user", "content": "word " * 400} for _ in range(1000)]
    source = (
        "{% set ns = namespace(t='') %}{% for m in messages %}[{{ m.role }}]{{ m['content'] | trim }}"
        "{% if not loop.last and messages[loop.index0 + 1].role == m.role %} {% endif %}{% endfor %}"
    )
    assert len(ChatTemplate({"default": source}, {}).render(messages)) == 1000 * 2005 + 999


@pytest.mark.parametrize(
    "name",
    [*sorted(RENDER_OPTIONS - {"variables"}), "range", "namespace", "_x", "a b", "", "class", "1", "a.b"],
)
def test_variables_whose_names_are_taken_are_refused_by_name(name: str) -> None:
    import asyncio
    from types import SimpleNamespace

    from null_llm import null_llm

    from carryall.runtime.service.core.handler import LLMHandler
    from carryall.runtime.service.core.served_model import ServedModel
    from carryall.runtime.service.http.openai.chat import chat_request

    async def test() -> None:
        async with null_llm() as llm:
            handler = LLMHandler()
            info: Any = SimpleNamespace(reads_images=False)
            handler.ready(ServedModel(llm, info))
            body = {"messages": MESSAGES, "max_tokens": 2, "chat_template_kwargs": {name: "{{ 1 }}"}}
            with pytest.raises(RequestError, match=f"'{name}' cannot be a chat template variable"):
                await anext(handler.generate(chat_request(body)))
            good = {**body, "chat_template_kwargs": {"enable_thinking": False}}
            assert [delta async for delta in handler.generate(chat_request(good))]

    asyncio.run(test())
