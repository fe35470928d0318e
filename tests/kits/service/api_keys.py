"""Files of API keys."""

from __future__ import annotations

import hashlib
from pathlib import Path


def key_file(folder: Path, **tables: str) -> Path:
    """Write a file of keys; the key of ``alice`` is ``alice-key``, and the value is the rest of its table."""
    path = folder / "keys.toml"
    path.write_text(
        "".join(
            f'[{name}]\nsha256 = "{hashlib.sha256(f"{name}-key".encode()).hexdigest()}"\n{rest}\n'
            for name, rest in tables.items()
        )
    )
    return path
