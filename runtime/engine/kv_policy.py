"""The interface of KV policies, which drop KV of running requests; the base class keeps all KV.

A policy is one file with a subclass that overrides ``wanted``, and a line in ``kv_policies.py``. Engine,
scheduler and slots use policies through these methods only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...providers.base import Runner
from .config import EngineConfig
from .requests.request import Request
from .schedule.scheduler import Scheduler
from .speculation.speculator import Speculator


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParts:
    """The parts of an engine that a policy uses.

    Args:
        runner: holds the KV.
        scheduler: tracks requests and slots.
        speculator: must forget a request whose tokens change.
        max_length: maximum number of tokens of a sequence.
    """

    runner: Runner
    scheduler: Scheduler
    speculator: Speculator
    max_length: int


class KVPolicy:
    """Keep all KV of a request until it ends.

    Args:
        config: the engine's options.
        parts: the engine's parts.

    Raises:
        UsageError: the runner or another option excludes the policy.
    """

    # Whether KV behind sliding windows may be freed. False for policies that recompute kept tokens.
    frees_windows = True

    def __init__(self, config: EngineConfig, parts: PolicyParts) -> None:
        self._config = config
        self._parts = parts

    @classmethod
    def wanted(cls, config: EngineConfig) -> str | None:
        """Return the name of the option that asks for this policy, None if it is not set."""
        return None

    def admit(self, request: Request, room: int) -> None:
        """Limit ``max_tokens`` of a new request to ``room``, the tokens that the context leaves free."""
        request.max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)

    def before_run(self, requests: Sequence[Request]) -> set[int]:
        """Change the KV of a step's requests before they run; return slots that lost their content."""
        return set()

    def after_step(self, requests: Sequence[Request]) -> None:
        """Change a step's requests after their new tokens were appended."""
