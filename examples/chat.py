"""Hold a conversation with a chat template.

An instruction-tuned checkpoint has a template. The demo model is not instruction-tuned, so this file defines
one.
"""

from carryall import LLM, SamplingParams

TEMPLATE = """\
{%- for message in messages -%}
# {{ message.role }}: {{ message.content }}
{% endfor -%}
{%- if add_generation_prompt %}# assistant:{% endif -%}
"""


def main() -> None:
    """Ask two questions; the second has the first answer in its history."""
    messages = [{"role": "system", "content": "You write short comments."}]
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=24, stop=["\n"])
    with LLM("demo") as llm:
        for question in ("What does this function do?", "And what does it return?"):
            messages.append({"role": "user", "content": question})
            answer = llm.chat(messages, params, chat_template=TEMPLATE)[0].outputs[0].text
            messages.append({"role": "assistant", "content": answer.strip()})
    for message in messages:
        print(f"{message['role']}: {message['content']}")


if __name__ == "__main__":
    main()
