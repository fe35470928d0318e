"""What happens to the KV of running requests: the interface of a policy, and the one that keeps all KV.

A policy is one file: a subclass with a ``wanted`` of its own, and its line in ``kv_policies.py``. Engine,
scheduler and slots know policies by these methods only.
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
    """What a policy works with.

    Args:
        runner: whose slots hold the KV.
        scheduler: keeps the books of slots and requests.
        speculator: knows the requests' tokens too.
        max_length: tokens of a full context.
    """

    runner: Runner
    scheduler: Scheduler
    speculator: Speculator
    max_length: int


class KVPolicy:
    """Keeps all KV of a request until it ends.

    Args:
        config: what the user chose.
        parts: what to work with.

    Raises:
        UsageError: of a policy that the runner or another option excludes.
    """

    # Whether KV behind sliding windows may be freed; not if a text may be computed anew.
    frees_windows = True

    def __init__(self, config: EngineConfig, parts: PolicyParts) -> None:
        self._config = config
        self._parts = parts

    @classmethod
    def wanted(cls, config: EngineConfig) -> str | None:
        """The option that asks for this policy, if it is set."""
        return None

    def admit(self, request: Request, room: int) -> None:
        """Limit a new request to the room that the context leaves behind its prompt."""
        request.max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)

    def before_run(self, requests: Sequence[Request]) -> set[int]:
        """Change the KV of a step's requests before they run; return slots whose content was lost by it."""
        return set()

    def after_step(self, requests: Sequence[Request]) -> None:
        """Look at a step's requests after their new tokens were appended."""
