"""Ray Serve's router of the replicas. Ray imports it by name; nothing else does, since it needs Ray."""

from __future__ import annotations

from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from .bounded_loads import ranked


class BoundedLoadRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Sends a session to the first replica of its ring that is not loaded far above the others."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return candidates of a request, one in each rank; see Ray's ``RequestRouter``."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        if any(len(rank) != 1 for rank in ranks):  # of no session
            return list(ranks)
        cache = self.replica_queue_len_cache
        loads = {replica.replica_id: cache.get(replica.replica_id) or 0 for replica in candidate_replicas}
        replicas = ranked(
            [rank[0] for rank in ranks],
            lambda replica: loads.get(replica.replica_id, 0),
            sum(loads.values()),
            len(loads),
        )
        return [[replica] for replica in replicas]
