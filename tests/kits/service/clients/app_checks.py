"""What the scripts of app clients share: the service, a schema, and a tool."""

from __future__ import annotations

import sys

from pydantic import BaseModel, Field

URL = f"{sys.argv[1]}/v1"
MODEL = "toy"
KEY = "none"


class City(BaseModel):
    """A city and its country; short, since the model of the test writes random letters."""

    name: str = Field(max_length=6, pattern="^[a-z]{1,6}$")
    large: bool


def is_city(value: object) -> bool:
    """Whether a structured answer is one."""
    return isinstance(value, City) and 0 < len(value.name) <= 6
