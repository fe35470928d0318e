"""The list of KV policies, and the choice of one by the options."""

from __future__ import annotations

from ...errors import UsageError
from .config import EngineConfig
from .context_shift import ContextShift
from .kv_eviction import KVEvictor
from .kv_policy import KVPolicy

POLICIES: tuple[type[KVPolicy], ...] = (KVEvictor, ContextShift)


def chosen_policy(config: EngineConfig) -> type[KVPolicy]:
    """Return the policy that the options ask for, by default ``KVPolicy``, which keeps all KV.

    Raises:
        UsageError: the options ask for two policies.
    """
    wanted = [(policy, option) for policy in POLICIES if (option := policy.wanted(config)) is not None]
    if len(wanted) > 1:
        raise UsageError(f"{' and '.join(option for _, option in wanted)} both drop tokens; choose one")
    return wanted[0][0] if wanted else KVPolicy
