"""Clients of the gRPC service: `Client` for threads, `AsyncClient` for asyncio.

    >>> from carryall.client import Client                              # doctest: +SKIP
    >>> with Client("localhost:8001") as client:                        # doctest: +SKIP
    ...     print(client.generate("def fib(n):", max_tokens=32).text)

Install them with `pip install 'carryall[service]'`. They import neither numpy nor a tensor runtime.
"""

from ..errors import AccessError as AccessError
from .aio import AsyncClient as AsyncClient
from .connection import TLS as TLS
from .errors import CallTimeoutError as CallTimeoutError
from .results import Answer as Answer
from .results import Completion as Completion
from .results import Reply as Reply
from .sync import Client as Client
