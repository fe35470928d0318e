"""A runner in a child process, with its own threads, allocator and driver; a crash ends only the child."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import CarryallError
from ..base import Row, RunnerConfig
from .remote_runner import RemoteRunner
from .runner_process import RunnerProcess, opened_info


class ProcessRunner(RemoteRunner):
    """A ``Runner`` that forwards calls and arrays to a child process through pipes.

    Args:
        provider: the name of the child's provider.
        model: the lowered model, as for ``Provider.runner``.
        config: as for ``Provider.runner``.

    Raises:
        CarryallError: ``Provider.runner`` raised it in the child.
        ProviderRuntimeError: the child ended.
    """

    def __init__(self, provider: str, model: Path, config: RunnerConfig) -> None:
        self._process = RunnerProcess()
        try:
            strict = dataclasses.replace(config, on_fallback=None)  # functions cannot be pickled
            info = opened_info(self._process.call(provider, model, strict, None), "the runner's process")
            # ``BestLogits`` have a function, so they cannot be pickled. Hidden states can: see ``forward``.
            self.info = dataclasses.replace(info, top_logits=0, steps_ahead=0)
        except CarryallError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        """Run one step; see ``Runner.forward``."""
        logits: list[npt.NDArray[np.float32]]
        logits, hidden_states = self._process.call("forward", list(rows))
        for row, states in zip(rows, hidden_states, strict=True):
            if row.last_hidden_states is not None:
                row.last_hidden_states[:] = states  # the child wrote into a copy
        return logits

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache as of the child's last answer, in bytes."""
        return self._process.kv_bytes

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._process.call(method, *arguments)

    def close(self) -> None:
        """End the child. The runner cannot be used afterwards."""
        self._process.close()
