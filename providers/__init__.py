"""Providers: one file and one class per target, found by file name.

``providers/targets/<name>.py`` ends with ``PROVIDER = <its Provider class>``. Other packages add providers
through the entry-point group ``carryall.providers``. See ``docs/adding_a_provider.md``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING

from ..errors import ProviderUnavailableError, UsageError
from . import targets
from .base import Provider

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "carryall.providers"


def _built_in() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(targets.__path__))


@functools.cache
def _third_party() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # 15 ms, which providers of this package do not need

    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def provider_names() -> list[str]:
    """Return the names of all providers, available or not."""
    return sorted({*_built_in(), *_third_party()})


def has_argument(name: str) -> bool:
    """Whether a name consists of a provider and its argument: ``ep:XNNPACK``."""
    base, _, argument = name.partition(":")
    return bool(argument) and base in provider_names() and get_provider(base).takes_argument


@functools.cache
def get_provider(name: str) -> Provider:
    """Return a provider by name. Its module is imported now, its libraries when it is first used.

    Raises:
        UsageError: there is no such provider.
        ProviderUnavailableError: a third-party provider's module cannot be imported.
    """
    base, _, argument = name.partition(":")
    if has_argument(name):
        provider: object = type(get_provider(base))(argument)  # type: ignore[call-arg]
    elif name in _built_in():
        provider = importlib.import_module(f".{name}", targets.__name__).PROVIDER()
    elif name in _third_party():
        point = _third_party()[name]
        try:
            provider = point.load()()
        except (ImportError, AttributeError) as error:
            raise ProviderUnavailableError(
                f"provider '{name}' ({point.value}) cannot be loaded: {error}"
            ) from error
    else:
        raise UsageError(f"unknown provider '{name}'; known providers: {', '.join(provider_names())}")
    if not isinstance(provider, Provider):
        raise ProviderUnavailableError(
            f"provider '{name}' is a {type(provider).__name__}, not a carryall Provider"
        )
    return provider
