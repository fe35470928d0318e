"""``carryall.v1.ChunkService``: KV of prompts for other services."""

from __future__ import annotations

import grpc

from ....proto import kv_pb2, kv_pb2_grpc
from ...engine.kv.tiers.served_store import ServedStore
from ..access.admission import Admission
from .statuses import Context, errors_as_status

_PIECE_BYTES = 1 << 20


class ChunkServicer(kv_pb2_grpc.ChunkServiceServicer):
    """Implements the service's methods with the store of the only model."""

    def __init__(self, models: Admission) -> None:
        self._models = models

    async def FindChunks(  # noqa: N802
        self, request: kv_pb2.FindChunksRequest, context: Context
    ) -> kv_pb2.FindChunksResponse:
        """Tell which chunks are there."""
        async with errors_as_status(context):
            store = await self._store(context)
            return kv_pb2.FindChunksResponse(found=store.exist(request.names))

    async def ReadChunk(self, request: kv_pb2.ReadChunkRequest, context: Context) -> None:  # noqa: N802
        """Stream the content of a chunk."""
        async with errors_as_status(context):
            content = (await self._store(context)).get(request.name)
            if content is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such chunk, or it was evicted")
            for begin in range(0, len(content), _PIECE_BYTES):
                piece = content[begin : begin + _PIECE_BYTES]
                await context.write(kv_pb2.ReadChunkResponse(content=piece))

    async def _store(self, context: Context) -> ServedStore:
        store = (await self._models.llm()).llm.engine.chunk_store
        if not isinstance(store, ServedStore):
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED,
                "this service has no store of its own; start it with --prefix-cache-url serve://4GB",
            )
        return store
