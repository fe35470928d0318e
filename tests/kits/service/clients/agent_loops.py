"""python agent_loops.py URL FOLDER FRAMEWORK: an agent of a framework reads, repairs and tests a file."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from loop_tools import TASK, check_repaired, edit_file, read_file, shell

URL, FRAMEWORK = f"{sys.argv[1]}/v1", sys.argv[3]
MODEL, KEY = "toy", "none"
TOOLS: list[Any] = [read_file, edit_file, shell]


def pydantic_ai() -> object:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    return Agent(model, tools=TOOLS).run_sync(TASK).output


def openai_agents() -> object:
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIResponsesModel(MODEL, AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
    agent = Agent(name="a", model=model, tools=[function_tool(tool) for tool in TOOLS])
    return Runner.run_sync(agent, TASK).final_output


def langgraph() -> object:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition
    from pydantic import SecretStr

    tools = [tool(function) for function in TOOLS]
    llm = ChatOpenAI(model=MODEL, base_url=URL, api_key=SecretStr(KEY), max_retries=0).bind_tools(tools)

    def call(state: MessagesState) -> Any:
        return {"messages": [llm.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("call", call)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "call")
    graph.add_conditional_edges("call", tools_condition)
    graph.add_edge("tools", "call")
    return graph.compile().invoke({"messages": [HumanMessage(TASK)]})["messages"][-1].content


def smolagents() -> object:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(MODEL, api_base=URL, api_key=KEY)
    return ToolCallingAgent(tools=[tool(function) for function in TOOLS], model=model, max_steps=8).run(TASK)


def dspy() -> object:
    import dspy as library

    library.configure(lm=library.LM(f"openai/{MODEL}", api_base=URL, api_key=KEY, cache=False, num_retries=0))
    predicted = library.Predict("question -> answer")(question="What is 2 + 2?")
    assert predicted.answer == "4", predicted
    reasoned = library.ChainOfThought("question -> answer: int")(question="What is 2 + 2?")
    assert (reasoned.answer, reasoned.reasoning) == (4, "Two and two."), reasoned
    return library.ReAct("task -> result", tools=TOOLS, max_iters=8)(task=TASK).result


def autogen() -> object:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import ModelFamily
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True,
                 "family": ModelFamily.UNKNOWN}  # fmt: skip
    client = OpenAIChatCompletionClient(model=MODEL, base_url=URL, api_key=KEY, model_info=info)
    agent = AssistantAgent("a", client, tools=TOOLS, max_tool_iterations=8)
    return asyncio.run(agent.run(task=TASK)).messages[-1].to_text()


def semantic_kernel() -> object:
    from openai import AsyncOpenAI
    from semantic_kernel import Kernel
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import kernel_function

    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    kernel = Kernel()
    kernel.add_service(OpenAIChatCompletion(ai_model_id=MODEL, async_client=client))
    kernel.add_functions("repair", [kernel_function(tool) for tool in TOOLS])
    agent = ChatCompletionAgent(kernel=kernel, name="a")
    return asyncio.run(agent.get_response(messages=TASK)).message.content


check_repaired(globals()[FRAMEWORK]())
print("fine")
