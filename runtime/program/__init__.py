"""Programs of several steps over a conversation with a model: generate, choose, fork and join.

>>> from carryall import LLM
>>> from carryall.program import assistant, gen, program, user
>>> @program(temperature=0)
... def capital(s, country):
...     s += user(f"What is the capital of {country}?")
...     s += assistant("It is ", gen("city", max_tokens=8, stop="."))
>>> capital.run(LLM("MODEL"), country="France")["city"]             # doctest: +SKIP
"""

from __future__ import annotations

from ..types.outputs import ToolCall
from .parts import Parts, assistant, gen, image, select, system, tool_result, user
from .program import Program, Run, program
from .prompts import PlaceAnswer, ProgramCancelledError
from .service import Service
from .state import Branches, ProgramState

__all__ = [
    "Branches",
    "Parts",
    "PlaceAnswer",
    "Program",
    "ProgramCancelledError",
    "ProgramState",
    "Run",
    "Service",
    "ToolCall",
    "assistant",
    "gen",
    "image",
    "program",
    "select",
    "system",
    "tool_result",
    "user",
]
