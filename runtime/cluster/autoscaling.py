"""How many replicas a deployment needs: by the prompt tokens that wait, and by the slots that are taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

WAITING_TOKENS = "waiting_tokens"
BUSY_SLOTS = "busy_slots"
# Share of its slots that a replica may use before there is another one.
_BUSY_SHARE = 0.8


def wanted_replicas(waiting: float, busy: float, tokens_per_replica: int) -> int:
    """Return how many replicas a load needs, at least one.

    Args:
        waiting: prompt tokens that are still to be computed, of all replicas together.
        busy: slots in use, in replicas: 1.5 is one replica and a half.
        tokens_per_replica: waiting prompt tokens for which there is one replica more.
    """
    return max(1, math.ceil(busy / _BUSY_SHARE + waiting / tokens_per_replica))


class WaitingTokens:
    """Ray Serve's policy of a deployment whose replicas report ``load`` in ``record_autoscaling_stats``.

    Ray Serve limits the number, and delays changes (``upscale_delay_s``, ``downscale_delay_s``).

    Args:
        tokens_per_replica: see ``wanted_replicas``.
    """

    def __init__(self, tokens_per_replica: int) -> None:
        self._tokens_per_replica = tokens_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas for Ray's ``AutoscalingContext``, and no state."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        waiting = sum(metrics.get(WAITING_TOKENS, {}).values())
        busy = sum(metrics.get(BUSY_SLOTS, {}).values())
        return wanted_replicas(waiting, busy, self._tokens_per_replica), {}
