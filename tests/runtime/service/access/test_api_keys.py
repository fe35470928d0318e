"""Files of hashed keys: what is refused, and that a broken change leaves the keys as they were."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from carryall.errors import UsageError
from carryall.runtime.service.access.api_keys import ApiKeys
from carryall.runtime.service.core.caller import Caller

DIGEST = hashlib.sha256(b"secret").hexdigest()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no keys"),
        ("[a]", "has no sha256"),
        ("a = 1", "must be a table"),
        ("[a", "cannot be read as TOML"),
        ('[a]\nsha256 = "12"', "64 hexadecimal digits"),
        (f'[a]\nsha256 = "{DIGEST}"\nmodel = ["x"]', "did you mean 'models'"),
    ],
)
def test_a_file_that_says_nothing_clear_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        ApiKeys(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml"):
        ApiKeys(tmp_path / "none.toml")


def test_keys_are_found_by_their_hash_and_survive_a_broken_change(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[a]\nsha256 = "{DIGEST.upper()}"\nmodels = ["x"]')
    keys = ApiKeys(file)
    assert keys.find("secret") == Caller("a", ("x",))
    assert keys.find(DIGEST) is keys.find("") is keys.find(None) is None
    file.write_text("[broken")
    assert keys.find("secret") is not None
    file.unlink()
    assert keys.find("secret") is not None
