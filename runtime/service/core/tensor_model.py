"""A served tensor model: its session and, if configured, its batcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ....errors import QueueFullError
from ....options import Checked, option
from ....records import dataclass

if TYPE_CHECKING:
    from ...api.dynamic_batching import DynamicBatcher
    from ...api.session import InferenceSession

MOST_WAITING = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching(Checked):
    """The table ``[batching]`` of a model's ``config.toml``: requests run together along their first axis.

    Args:
        max_size: the maximum number of rows of a batch; a larger request runs alone.
        max_delay: seconds that the first request of a batch waits for others.
        max_queue: the maximum number of requests that wait for a batch.
    """

    max_size: int = option(32, least=1)
    max_delay: float = option(0.002, least=0, most=60)
    max_queue: int = option(MOST_WAITING, least=1)


class TensorModel:
    """A session, and the batcher of its requests.

    Args:
        session: the session.
        batching: how requests are batched; None runs each alone.
        max_queue: the maximum number of requests that wait while another one runs outside of batches; None is
            no limit.

    Raises:
        UsageError: an input or output has no free first axis, so requests cannot be batched.
    """

    def __init__(
        self,
        session: InferenceSession,
        batching: Batching | None = None,
        max_queue: int | None = MOST_WAITING,
    ) -> None:
        self.session = session
        self._max_queue = max_queue
        self.alone = 0  # requests in progress outside of batches
        self.batcher: DynamicBatcher | None = None
        self.most_rows = 0
        if batching is not None:
            from ...api.dynamic_batching import DynamicBatcher  # not needed by language models

            self.most_rows = batching.max_size
            self.batcher = DynamicBatcher(
                session,
                max_batch_size=batching.max_size,
                max_delay=batching.max_delay,
                max_queue=batching.max_queue,
            )

    @contextmanager
    def running_alone(self) -> Iterator[None]:
        """Count a request that runs outside of batches; not thread-safe.

        Raises:
            QueueFullError: too many are in progress.
        """
        if self._max_queue is not None and self.alone > self._max_queue:
            raise QueueFullError(f"{self._max_queue} requests are waiting; retry later")
        self.alone += 1
        try:
            yield
        finally:
            self.alone -= 1

    def warm_up(self) -> bool:
        """Run once on zeros, with size 1 on free axes; return whether the model could run on them."""
        import numpy as np

        from ....providers.ort import ort

        feeds: dict[str, Any] = {}
        for value in self.session.get_inputs():
            shape = [size if isinstance(size, int) else 1 for size in value.shape or []]
            kind = value.type.removeprefix("tensor(").removesuffix(")")
            names = {"float": "float32", "double": "float64", "string": "str"}
            try:
                feeds[value.name] = np.zeros(shape, names.get(kind, kind))
            except TypeError:  # NumPy lacks the type, such as bfloat16
                return False
        try:
            self.session.run(None, feeds)
        except ort.runtime_errors():  # zeros need not be valid input
            return False
        return True

    def close(self) -> None:
        """Finish queued requests, then stop the batcher. Requests in progress hold the session."""
        if self.batcher is not None:
            self.batcher.close()
