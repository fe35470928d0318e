"""The replica of a session, unless it has far more requests than others.

Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018): a session's requests go
to the first replica of its ring whose load is below a multiple of the mean, so that prefixes stay where they
are and no replica is flooded by the sessions that fall to it.
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
    replicas: Sequence[Replica], load: Callable[[Replica], int], total: int, count: int
) -> list[Replica]:
    """Return the replicas of a session in the order in which they are to be asked.

    Args:
        replicas: in the order of its ring.
        load: returns the requests in progress of a replica.
        total: requests in progress of all replicas.
        count: the number of all replicas.
    """
    bound = max(_FREE, math.ceil(_BOUND * (total + 1) / max(1, count)))
    fitting = [replica for replica in replicas if load(replica) < bound]
    return fitting + [replica for replica in replicas if replica not in fitting]
