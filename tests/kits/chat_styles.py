"""Chat templates in each style of calls and thoughts, none of them a real model's."""

from __future__ import annotations

from collections.abc import Iterator

_FRAME = """\
{%- if tools %}<|turn>tools
{{ tools | tojson }}<turn|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|turn>assistant{{ '\n' }}THOUGHT{%- if m.content %}CONTENT{% endif %}
{%- if m.tool_calls %}CALLS{% endif %}<turn|>
{% else %}<|turn>{{ m.role }}
{{ m.content }}<turn|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|turn>assistant
PROMPT{% endif %}"""

_FUNCTION = "{%- for c in m.tool_calls %}{%- set f = c.function %}"
_END = "{%- endfor %}"
_COMMA = "{{ ', ' if not loop.last }}"
_PAIRS = "{%- for k, v in f.arguments.items() %}"
_TEXT = "{{ v if v is string else v | tojson }}"

CALLS = {
    "tagged objects": (
        f'{_FUNCTION}\n<call>\n{{"name": "{{{{ f.name }}}}", '
        f'"arguments": {{{{ f.arguments | tojson }}}}}}\n</call>{_END}'
    ),
    "list": (
        f'[CALLS][{_FUNCTION}{{"name": "{{{{ f.name }}}}", "arguments": {{{{ f.arguments | tojson }}}}, '
        f'"id": "{{{{ c.id }}}}"}}{_COMMA}{_END}]'
    ),
    "section of objects": (
        f'<|calls|>[{_FUNCTION}{{"call_id": "{{{{ loop.index0 }}}}", '
        f'"tool": "{{{{ f.name }}}}", '
        f'"parameters": {{{{ f.arguments | tojson }}}}}}{_COMMA}{_END}]'
        "<|end_calls|>"
    ),
    "nested objects": (
        f"<calls>{_FUNCTION}{{{{ {{'type': 'function', 'function': {{'name': f.name, "
        f"'arguments': f.arguments}}}} | tojson }}}}\n{_END}</calls>"
    ),
    "names as keys": (
        f'<|calls|>[{_FUNCTION}{{"{{{{ f.name }}}}": {{{{ f.arguments | tojson }}}}}}{_COMMA}{_END}]'
        "<|end_calls|>"
    ),
    "names before JSON": f"{_FUNCTION}[CALL]{{{{ f.name }}}}[ARGS]{{{{ f.arguments | tojson }}}}{_END}",
    "names with ids": (
        f"<|calls|>{_FUNCTION}<|call|>functions.{{{{ f.name }}}}:{{{{ loop.index0 }}}}<|args|>"
        f"{{{{ f.arguments | tojson }}}}<|end_call|>{_END}<|end_calls|>"
    ),
    "fenced JSON": (
        f"<|calls|>{_FUNCTION}<|call|>function<|sep|>{{{{ f.name }}}}\n```json\n"
        f"{{{{ f.arguments | tojson }}}}\n```<|end_call|>{_END}<|end_calls|>"
    ),
    "parameters": (
        f"{_FUNCTION}\n<call>\n<function={{{{ f.name }}}}>\n{_PAIRS}<parameter={{{{ k }}}}>\n{_TEXT}\n"
        f"</parameter>\n{_END}</function>\n</call>{_END}"
    ),
    "keys and values": (
        f"{_FUNCTION}\n<call>{{{{ f.name }}}}\n{_PAIRS}<key>{{{{ k }}}}</key>\n<value>{_TEXT}</value>\n{_END}"
        f"</call>{_END}"
    ),
    "typed parameters": (
        f'\n<calls>\n{_FUNCTION}<invoke name="{{{{ f.name }}}}">\n{_PAIRS}<parameter name="{{{{ k }}}}" '
        f'string="{{{{ (v is string) | tojson }}}}">{_TEXT}</parameter>\n{_END}</invoke>\n{_END}</calls>'
    ),
}  # fmt: skip

# Values as Python writes them, or with own quotes.
_LITERAL = """
{%- macro literal(v, q, key) -%}
{%- if v is string %}{{ q }}{{ v }}{{ q }}
{%- elif v is mapping %}{{ '{' }}{%- for k, x in v.items() -%}
{{ key }}{{ k }}{{ key }}:{{ literal(x, q, key) }}{{ ',' if not loop.last }}
{%- endfor -%}{{ '}' }}
{%- elif v is iterable %}[
{%- for x in v %}{{ literal(x, q, key) }}{{ ',' if not loop.last }}{% endfor %}]
{%- else %}{{ v | tojson }}{% endif %}
{%- endmacro -%}
"""
LITERALS = {
    "quoted by a token": (
        f"{_FUNCTION}<|call>call:{{{{ f.name }}}}{{{{ '{{' }}}}{_PAIRS}{{{{ k }}}}:"
        f"{{{{ literal(v, '<|q|>', '') }}}}"
        f"{{{{ ',' if not loop.last }}}}{_END}}}<call|>{_END}"
    ),
    "Python calls": (
        f"<|calls|>[{_FUNCTION}{{{{ f.name }}}}({_PAIRS}{{{{ k }}}}={{{{ v | tojson }}}}{_COMMA}{_END})"
        f"{_COMMA}{_END}]<|end_calls|>"
    ),
}  # fmt: skip

SINGLE = {
    "bare object": (
        "{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
        f'{_FUNCTION}{{"name": "{{{{ f.name }}}}", '
        f'"parameters": {{{{ f.arguments | tojson }}}}}}{_END}'
    ),
}  # fmt: skip

THOUGHTS = {
    "no thoughts": ("", "{{ m.content }}", ""),
    "thoughts": (
        "{%- if m.reasoning_content %}<thought>\n{{ m.reasoning_content }}\n</thought>\n\n{% endif %}",
        "{{ m.content }}", "",
    ),
    "thoughts that the prompt opens": (
        "{%- if m.reasoning_content %}<thought>\n{{ m.reasoning_content }}\n</thought>\n\n{% endif %}",
        "{{ m.content }}", "<thought>\n",
    ),
    "thoughts and texts in tags": (
        "{%- if m.reasoning_content %}<|think|>{{ m.reasoning_content }}<|end_think|>{% endif %}",
        "<|text|>{{ m.content }}<|end_text|>", "",
    ),
}  # fmt: skip


def template(calls: str, thoughts: str = "no thoughts") -> str:
    """Return a chat template with a style of calls and one of thoughts."""
    thought, content, prompt = THOUGHTS[thoughts]
    written = (CALLS | LITERALS | SINGLE)[calls]
    frame = (
        _FRAME.replace("THOUGHT", thought)
        .replace("CONTENT", content)
        .replace("CALLS{%", f"{written}{{%")
        .replace("PROMPT", prompt)
    )
    return (_LITERAL + frame) if calls in LITERALS else frame


def styles() -> Iterator[tuple[str, str]]:
    """Yield the names of all styles of calls with each of thoughts."""
    for calls in CALLS | LITERALS | SINGLE:
        for thoughts in THOUGHTS:
            yield calls, thoughts
