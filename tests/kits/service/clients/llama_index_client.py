"""python llama_index_client.py URL: LlamaIndex over OpenAI's chat."""

from __future__ import annotations

from app_checks import KEY, MODEL, URL, City, is_city
from checks import check, main
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=MODEL, api_base=URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_retries=0,
    context_window=4096, temperature=0.0, max_tokens=300, should_use_structured_outputs=True,
)  # fmt: skip


def weather(sunny: bool) -> str:
    """Tell the weather."""
    return f"sunny: {sunny}"


@check
def text_and_stream() -> None:
    answer = llm.chat([ChatMessage(role="user", content="Hi")], max_tokens=8)
    assert answer.message.content is not None
    assert list(llm.stream_chat([ChatMessage(role="user", content="Hi")], max_tokens=8))
    assert llm.complete("def f", max_tokens=8).text is not None


@check
def a_tool_is_called() -> None:
    tool = FunctionTool.from_defaults(fn=weather)
    answer = llm.chat_with_tools([tool], user_msg="Hi", tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    assert calls[0].tool_name == "weather"
    assert "sunny" in calls[0].tool_kwargs


@check
def structured() -> None:
    found = llm.as_structured_llm(City).chat([ChatMessage(role="user", content="Hi")])
    assert is_city(found.raw)


@check
def structured_by_a_call() -> None:
    from llama_index.core.program import FunctionCallingProgram

    program = FunctionCallingProgram.from_defaults(
        output_cls=City, prompt_template_str="Hi", llm=llm, tool_required=True
    )
    found = program()
    assert is_city(found[0] if isinstance(found, list) else found)


main()
