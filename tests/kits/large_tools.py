"""Tools with large schemas."""

from __future__ import annotations

from typing import Any

KINDS = [{"type": "string", "maxLength": 2000}, {"type": "integer", "maximum": 10_000}, {"type": "null"}]
OPTION = {"anyOf": KINDS, "description": "What it is for, in a few words. " * 10}


def large_tool(number: int) -> dict[str, Any]:
    """A tool as an agent's client describes it, with 1,700 characters of schema; its name has the number."""
    edit = {"type": "object", "properties": {"old": {"type": "string"}, "new": {"type": "string"}},
            "required": ["old", "new"], "additionalProperties": False}  # fmt: skip
    properties = {
        f"path_{number}": {"type": "string", "maxLength": 4000},
        "mode": {"enum": ["read", "write"]},
        "options": {"type": "object", "properties": {f"option_{at}": OPTION for at in range(5)}},
        "edits": {"type": "array", "items": {"$ref": "#/$defs/Edit"}, "maxItems": 1000},
        "when": {"type": "string", "format": "date-time"},
        "id": {"type": "string", "format": "uuid"},
        "pattern": {"type": "string", "pattern": "^[a-z]{1,40}$"},
    }
    parameters = {"type": "object", "properties": properties, "required": [f"path_{number}", "mode"],
                  "$defs": {"Edit": edit}}  # fmt: skip
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}
