"""OpenAI's files and batches endpoints."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from ....errors import RequestError, ServiceUnavailableError, UsageError
from ....storage.paths import check_name
from ...service.access.admission import Admission
from ...service.core.caller import CALLER, caller_name
from ...service.core.config import ServerConfig
from ...service.core.handler import LOADING
from ...service.http.service import json_response, service_of
from .batch import KNOWN, Batch
from .batches import BatchQueue
from .files import BATCH, FileStore, StoredFile, expiry_seconds
from .records import MOST_LISTED, page_json
from .served import ServedExecutor

_COPY_BYTES = 2**20
_MOST_NAME = 255
# Bytes of a too large file that are read and dropped: many clients read the response only after the upload.
_PASSED_OVER_BYTES = 16 * 2**20


class BatchService:
    """The files and batches endpoints, and the batch queue.

    Args:
        folder: the folder of files and batches.
        config: the service's settings.

    Raises:
        UsageError: the folder cannot be used.
    """

    def __init__(self, folder: Path, config: ServerConfig) -> None:
        self._config = config
        self._admission: Admission | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._folder = folder
        self._started: tuple[FileStore, BatchQueue] | None = None
        check_name(folder)
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--batch-folder {folder} is not a folder")

    @property
    def _files(self) -> FileStore:
        return self._stores[0]

    @property
    def _batches(self) -> BatchQueue:
        return self._stores[1]

    @property
    def _stores(self) -> tuple[FileStore, BatchQueue]:
        if self._started is None:
            raise ServiceUnavailableError(LOADING)
        return self._started

    async def start(self, models: Admission) -> None:
        """Open the folder and resume its batches; create the folder if it does not exist.

        Raises:
            UsageError: the folder cannot be used.
        """
        self._loop, self._admission = asyncio.get_running_loop(), models
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            files = FileStore(self._folder)
            batches = BatchQueue(self._folder, files, self._executor)
        except OSError as error:
            raise UsageError(f"--batch-folder {self._folder} cannot be used: {error.strerror}") from error
        self._started = files, batches
        batches.start()

    async def stop(self) -> None:
        """Stop the queue; the next process resumes the batches."""
        if self._started is not None:
            await asyncio.to_thread(self._batches.stop)

    def routes(self) -> list[Route]:
        """Return the routes of the endpoints."""
        return [
            Route("/v1/files", self._upload, methods=["POST"]),
            Route("/v1/files", self._list_files),
            Route("/v1/files/{id}", self._get_file),
            Route("/v1/files/{id}", self._delete_file, methods=["DELETE"]),
            Route("/v1/files/{id}/content", self._content),
            Route("/v1/batches", self._create, methods=["POST"]),
            Route("/v1/batches", self._list),
            Route("/v1/batches/{id}", self._get),
            Route("/v1/batches/{id}/cancel", self._cancel, methods=["POST"]),
        ]

    def _executor(self, batch: Batch) -> ServedExecutor:
        if self._loop is None or self._admission is None:
            raise RuntimeError("the service was not started")
        return ServedExecutor(self._admission, self._loop, batch)

    async def _upload(self, request: Request) -> Response:
        """Handle ``POST /v1/files``: store a file of requests."""
        async with _form(request, self._config.max_file_bytes) as form:
            sent, purpose = form.get("file"), form.get("purpose")
            if not isinstance(sent, UploadFile):
                raise RequestError("the form has no part 'file' with a file")
            if purpose != BATCH:
                raise RequestError(f"'purpose' must be 'batch', not {purpose!r}")
            parts = {name: form.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
            seconds = expiry_seconds("expires_after", parts if any(parts.values()) else None)
            stored = await asyncio.to_thread(self._add, sent, seconds, caller_name())
        return json_response(stored.to_json())

    def _add(self, sent: UploadFile, seconds: int | None, owner: str | None) -> StoredFile:
        path = self._files.upload_path()
        try:
            with path.open("wb") as stream:
                while piece := sent.file.read(_COPY_BYTES):
                    stream.write(piece)
            name = (sent.filename or "input.jsonl")[:_MOST_NAME]
            return self._files.add(path, filename=name, purpose=BATCH, owner=owner, expires_after=seconds)
        finally:
            path.unlink(missing_ok=True)

    async def _list_files(self, request: Request) -> Response:
        """Handle ``GET /v1/files``: list the files."""
        asked = request.query_params
        if (order := asked.get("order", "desc")) not in ("asc", "desc"):
            raise RequestError(f"'order' must be asc or desc, not {order!r}")
        page = self._files.page(
            caller_name(),
            after=asked.get("after"),
            limit=_limit(request, 10_000),
            newest_first=order == "desc",
            purpose=asked.get("purpose"),
        )
        return json_response(page_json(*page))

    async def _get_file(self, request: Request) -> Response:
        """Handle ``GET /v1/files/{id}``: describe a file."""
        return json_response(self._files.get(request.path_params["id"], caller_name()).to_json())

    async def _delete_file(self, request: Request) -> Response:
        """Handle ``DELETE /v1/files/{id}``: delete a file."""
        name = request.path_params["id"]
        await asyncio.to_thread(self._files.delete, name, caller_name())
        return json_response({"id": name, "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        """Handle ``GET /v1/files/{id}/content``: return the content of a file."""
        name = request.path_params["id"]
        file = self._files.get(name, caller_name())
        path = self._files.content(name, caller_name())
        # An error 500; once the response has begun, it could only be cut off.
        await asyncio.to_thread(_check_readable, path)
        return FileResponse(path, media_type="application/octet-stream", filename=file.filename)

    async def _create(self, request: Request) -> Response:
        """Handle ``POST /v1/batches``: run a file of requests."""
        body, headers = await service_of(request).known_body(request, KNOWN)
        caller = CALLER.get()
        models = () if caller is None else caller.models
        made = await asyncio.to_thread(self._batches.create, body, caller_name(), models)
        return json_response(made, headers)

    async def _list(self, request: Request) -> Response:
        """Handle ``GET /v1/batches``: list the batches."""
        after = request.query_params.get("after")
        found = self._batches.page(caller_name(), after=after, limit=_limit(request, 20, MOST_LISTED))
        return json_response(page_json(*found))

    async def _get(self, request: Request) -> Response:
        """Handle ``GET /v1/batches/{id}``: describe a batch."""
        return json_response(self._batches.get(request.path_params["id"], caller_name()))

    async def _cancel(self, request: Request) -> Response:
        """Handle ``POST /v1/batches/{id}/cancel``: cancel a batch."""
        name, owner = request.path_params["id"], caller_name()
        return json_response(await asyncio.to_thread(self._batches.cancel, name, owner))


def _check_readable(path: Path) -> None:
    with path.open("rb") as file:
        file.read(1)


def _limit(request: Request, usual: int, most: int | None = None) -> int:
    text = request.query_params.get("limit", str(usual))
    most = usual if most is None else most
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise RequestError(f"'limit' must be a whole number from 1 to {most}, not {text!r}")
    return int(text)


@contextlib.asynccontextmanager
async def _form(request: Request, most: int) -> AsyncGenerator[Any, None]:
    """Yield the parsed form of a request, with one file stored on the disk.

    Raises:
        RequestError: the body is not a valid multipart form.
        HTTPException: the body has more than ``most`` bytes (413), or the client disconnects (400).
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise RequestError("the body must be a form (multipart/form-data) with 'file' and 'purpose'")
    too_large = HTTPException(413, f"the file has more than {most} bytes", {"Connection": "close"})

    async def limited() -> AsyncGenerator[bytes, None]:
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > most + _PASSED_OVER_BYTES:
                raise too_large
            if size <= most:
                yield piece
        if size > most:
            raise too_large

    try:
        form = await MultiPartParser(request.headers, limited(), max_files=1, max_fields=16).parse()
    except MultiPartException as error:
        raise RequestError(f"the form cannot be read: {error.message}") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the connection ended before the end of the body") from error
    try:
        yield form
    finally:
        await form.close()
