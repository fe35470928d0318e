"""Finding providers by file name and by entry point."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import pytest

from carryall import providers
from carryall.errors import ProviderUnavailableError, UsageError
from carryall.providers import get_provider, provider_names
from carryall.providers.base import Provider
from carryall.providers.targets.cpu import CpuProvider


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A third-party provider, one that cannot be imported, and an object that is not a provider."""
    points = {
        "theirs": "carryall.providers.targets.cpu:CpuProvider",
        "broken": "nowhere:Thing",
        "odd": "builtins:dict",
    }
    found = [
        importlib.metadata.EntryPoint(name, value, providers.ENTRY_POINT_GROUP)
        for name, value in points.items()
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: found)
    providers._third_party.cache_clear()
    get_provider.cache_clear()
    yield
    providers._third_party.cache_clear()
    get_provider.cache_clear()


def test_every_file_in_targets_is_a_provider() -> None:
    assert {"cpu", "null"} <= set(provider_names())
    for name in provider_names():
        provider = get_provider(name)
        assert isinstance(provider, Provider)
        assert provider.name == name


@pytest.mark.usefixtures("entry_points")
def test_third_parties_add_providers_by_entry_point() -> None:
    assert "theirs" in provider_names()
    assert isinstance(get_provider("theirs"), CpuProvider)
    with pytest.raises(ProviderUnavailableError, match=r"'broken' .*nowhere"):
        get_provider("broken")
    with pytest.raises(ProviderUnavailableError, match="'odd' is a dict, not a carryall Provider"):
        get_provider("odd")


@pytest.mark.parametrize("name", ["nonsense", "base", "ort", ""])
def test_unknown_names_list_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match=rf"unknown provider '{name}'; known providers: .*cpu.*null"):
        get_provider(name)
