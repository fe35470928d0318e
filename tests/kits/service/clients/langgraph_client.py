"""python langgraph_client.py URL: a graph of LangGraph with a tool, and structured answers of LangChain."""

from __future__ import annotations

from typing import Any

from app_checks import KEY, MODEL, URL, City, is_city
from checks import check, main
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from pydantic import SecretStr

llm = ChatOpenAI(
    model=MODEL, base_url=URL, api_key=SecretStr(KEY), max_retries=0, temperature=0, max_tokens=300
)


@tool  # type: ignore[untyped-decorator]
def weather(sunny: bool) -> str:
    """Tell the weather."""
    return "noted"


@check
def a_graph_calls_a_tool_and_reads_its_result() -> None:
    caller = llm.bind_tools([weather], tool_choice="weather")

    def call(state: MessagesState) -> Any:
        return {"messages": [caller.invoke(state["messages"])]}

    def answer(state: MessagesState) -> Any:
        return {"messages": [llm.bind(max_tokens=8).invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("call", call)
    graph.add_node("tools", ToolNode([weather]))
    graph.add_node("answer", answer)
    graph.add_edge(START, "call")
    graph.add_edge("call", "tools")
    graph.add_edge("tools", "answer")
    graph.add_edge("answer", END)
    messages = graph.compile().invoke({"messages": [HumanMessage("Hi")]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[2].content == "noted"


@check
def structured_by_a_schema() -> None:
    assert is_city(llm.with_structured_output(City, method="json_schema").invoke("Hi"))


@check
def structured_by_a_call() -> None:
    assert is_city(llm.with_structured_output(City, method="function_calling").invoke("Hi"))


@check
def structured_response() -> None:
    responses = ChatOpenAI(
        model=MODEL,
        base_url=URL,
        api_key=SecretStr(KEY),
        max_retries=0,
        temperature=0,
        max_tokens=300,
        use_responses_api=True,
    )
    assert is_city(responses.with_structured_output(City, method="json_schema").invoke("Hi"))


main()
