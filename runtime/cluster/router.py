"""Ray Serve's router of the replicas. Ray imports it by name; nothing else does, since it needs Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from . import prefix_index  # the module: Ray would send a copy of the index itself with the class
from .bounded_loads import ranked


class PrefixRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Sends a request to the replica with the longest part of its prompt, else to that of its session's ring.

    A replica that is loaded far above the others is passed over.
    """

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return candidates of a request, one in each rank; see Ray's ``RequestRouter``."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        if any(len(rank) != 1 for rank in ranks):  # of no session
            return list(ranks)
        cache = self.replica_queue_len_cache
        loads = {replica.replica_id: cache.get(replica.replica_id) or 0 for replica in candidate_replicas}
        held = prefix_index.INDEX.held(_chunks(pending_request))
        replicas = ranked(
            [rank[0] for rank in ranks],
            candidate_replicas,
            lambda replica: held.get(replica.replica_id.unique_id, 0),
            lambda replica: loads.get(replica.replica_id, 0),
        )
        return [[replica] for replica in replicas]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Record that a replica computes a prompt; see Ray's ``RequestRouter``."""
        super().on_request_routed(pending_request, replica_id, result)
        prefix_index.INDEX.use(_chunks(pending_request), replica_id.unique_id)


def _chunks(pending_request: Any) -> tuple[bytes, ...]:
    """Return the third argument of ``Replica.answer``; calls of other methods have none."""
    args: Sequence[Any] = () if pending_request is None else pending_request.args
    return args[2] if len(args) > 2 else ()
