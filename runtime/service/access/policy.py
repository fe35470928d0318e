"""The settings and API keys in force, which SIGHUP reloads."""

from __future__ import annotations

import dataclasses
import logging

from ..core.config import RELOADED, ServerConfig
from .api_keys import ApiKeys

_log = logging.getLogger(__name__)


class Policy:
    """The settings and API keys in force, shared by all transports.

    Args:
        config: the settings at startup.

    Raises:
        UsageError: the API key file cannot be read.

    Attributes:
        config: the settings in force.
        keys: the API keys; None accepts all requests.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.keys = ApiKeys(config.api_keys) if config.api_keys else None

    def reload(self, config: ServerConfig | None) -> None:
        """Read the API keys again and take over new settings.

        Settings that need a restart keep their values; the log names them.

        Args:
            config: the new settings; None keeps the old ones.
        """
        if self.keys is not None:
            self.keys.reload()
        if config is None:
            return
        changed = [
            field.name
            for field in dataclasses.fields(config)
            if getattr(config, field.name) != getattr(self.config, field.name)
        ]
        later = [name for name in changed if name not in RELOADED]
        if later:
            _log.warning("these settings change after a restart only: %s", ", ".join(later))
        values = {name: getattr(config, name) for name in changed if name in RELOADED}
        self.config = dataclasses.replace(self.config, **values)
        _log.info("reloaded; changed settings: %s", ", ".join(sorted(values)) or "none")
