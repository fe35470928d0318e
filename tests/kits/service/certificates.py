"""Certificates of services and clients in tests."""

from __future__ import annotations

import os
from pathlib import Path

import trustme


def write_certificate(authority: trustme.CA, folder: Path) -> tuple[Path, Path]:
    """A certificate for localhost and its key, in place of earlier ones."""
    made = authority.issue_cert("localhost")
    certificate, key = folder / "server.pem", folder / "server.key"
    made.private_key_pem.write_to_path(key)
    made.cert_chain_pems[0].write_to_path(certificate)
    for path in (certificate, key):
        os.utime(path, ns=(path.stat().st_mtime_ns + 10**9,) * 2)
    return certificate, key


def authority(folder: Path, name: str) -> tuple[trustme.CA, Path]:
    made, path = trustme.CA(), folder / name
    made.cert_pem.write_to_path(path)
    return made, path
