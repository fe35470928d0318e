"""A local HTTP server in place of the Hugging Face hub, with one repository, ``org/tiny``."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHA = "0123456789abcdef0123456789abcdef01234567"


class StandIn(BaseHTTPRequestHandler):
    """HTTP handler that serves one repository, ``org/tiny``, from a folder."""

    folder: Path
    requested: list[str]

    def do_GET(self) -> None:
        self.requested.append(self.path)
        path = self.path.partition("?")[0]
        names = [
            file.relative_to(self.folder).as_posix() for file in self.folder.rglob("*") if file.is_file()
        ]
        if path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main"):
            siblings = [{"rfilename": name, "size": (self.folder / name).stat().st_size} for name in names]
            self._send(json.dumps({"id": "org/tiny", "sha": SHA, "siblings": siblings}).encode())
        elif path == f"/api/models/org/tiny/tree/{SHA}":
            files = [(name, self.folder / name) for name in names]
            facts = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": _digest(file)}
                for name, file in files
            ]
            self._send(json.dumps(facts).encode())
        elif path.startswith(start := f"/org/tiny/resolve/{SHA}/"):
            file = self.folder / path.removeprefix(start)
            content, status = file.read_bytes(), 200
            if part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                content, status = content[int(part[1]) : int(part[2]) + 1], 206
            told = {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": SHA}
            self._send(content, told, status=status)
        else:
            self._send(b"{}", {"X-Error-Code": "RepoNotFound"}, status=404)

    do_HEAD = do_GET  # noqa: N815 -- the name http.server looks for

    def _send(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- http.server's own name
        pass


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def hub_of(folder: Path) -> Iterator[str]:
    """Serve a folder as ``org/tiny``; yield the address."""
    StandIn.folder, StandIn.requested = folder, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def hub_environment(endpoint: str, home: Path) -> dict[str, str]:
    """Return the variables of a process that uses this hub, and ``home`` for its files."""
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return {**os.environ, **own}
