"""A client of the gRPC service, for threads (`Client`) and for asyncio (`AsyncClient`).

    >>> from carryall.client import Client                              # doctest: +SKIP
    >>> with Client("localhost:8001") as client:                        # doctest: +SKIP
    ...     print(client.generate("def fib(n):", max_tokens=32).text)

It needs `pip install 'carryall[service]'` and loads neither numpy nor a tensor runtime.
"""

from .aio import AsyncClient as AsyncClient
from .connection import TLS as TLS
from .errors import AccessError as AccessError
from .errors import CallTimeoutError as CallTimeoutError
from .results import Answer as Answer
from .results import Completion as Completion
from .results import Reply as Reply
from .sync import Client as Client
