"""A conversation, written for the model by a chat template.

An instruction-tuned checkpoint brings its own template; the demo model is none, so this one is made up.
"""

from carryall import LLM, SamplingParams

TEMPLATE = """\
{%- for message in messages -%}
# {{ message.role }}: {{ message.content }}
{% endfor -%}
{%- if add_generation_prompt %}# assistant:{% endif -%}
"""


def main() -> None:
    """Ask twice, the second time with the first answer in the history."""
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
