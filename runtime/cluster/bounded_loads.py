"""The replica of a session, unless it has far more requests than others.

Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018): a session's requests go
to the first replica of its ring whose load is below a multiple of the mean, so that prefixes stay where they
are and no replica is flooded by the sessions that fall to it. Replicas that hold equally much of a prompt
share its requests by their loads, since a prefix that many ask for at once is soon held by several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

Replica = TypeVar("Replica")

# A replica may have this multiple of the mean load.
_BOUND = 1.5
# Requests below which a replica is never passed over: they share a step.
_FREE = 4


def ranked(
    ring: Sequence[Replica],
    others: Sequence[Replica],
    held: Callable[[Replica], int],
    load: Callable[[Replica], int],
) -> list[Replica]:
    """Return replicas of a request in the order in which they are to be asked.

    Args:
        ring: replicas in the order of the session's ring.
        others: all replicas; those that hold a part of the prompt are asked too.
        held: returns how much of the prompt a replica holds.
        load: returns the requests in progress of a replica.
    """
    bound = max(_FREE, math.ceil(_BOUND * (sum(map(load, others)) + 1) / max(1, len(others))))
    order = [*ring, *(each for each in others if held(each) and each not in ring)]
    order.sort(key=lambda each: (load(each) >= bound, -held(each), load(each) if held(each) else 0))
    return order
