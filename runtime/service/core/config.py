"""Settings of the service. Imports no transport, so that the command line loads fast."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from ....errors import UsageError
from ....options import Checked, option
from ....records import dataclass

_ENDPOINT = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}/?")
_IMAGE_DOMAIN = re.compile(r"(https?://)?([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
# The settings that SIGHUP reloads (docs/serving.md).
RELOADED = (
    "any_model_name",
    "body_timeout_seconds",
    "grace_seconds",
    "image_domains",
    "max_body_bytes",
    "max_choices",
    "max_logprobs",
    "reasoning_budget",
    "reasoning_budget_message",
    "stream_interval",
    "strict",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Checked):
    """Addresses, access control and limits of the service.

    Args:
        host: where to listen; 0.0.0.0 is every address of this machine.
        http_port: port for HTTP; 0 takes a free one, none serves no HTTP.
        unix_socket: serve HTTP on a socket in the file system too, for processes of this user.
        grpc_port: port for gRPC; 0 takes a free one, none serves no gRPC.
        role: ``prefill`` also computes prompts for services with ``--prefill-server``; ``decode`` is such a
            service. By default a service does all of its work itself (docs/fleet.md).
        grace_seconds: how long running requests may continue after the service is told to stop.
        models: a folder of models to serve, instead of MODEL (docs/serving.md).
        models_poll_seconds: look for changed models at this interval; without it, at SIGHUP only.
        memory_limit: while the process uses more memory, unload idle models, least recently used first; the
            next request loads them again.
        keep_alive_seconds: unload a model to which no request came for so long; the next request loads it
            again. By default models stay loaded. Ollama's ``keep_alive`` sets it for a model.
        served_model_names: more names that requests may use for the model.
        aliases: more names for models, as NAME=MODEL; ``*`` in NAME stands for any text (``claude-*=qwen3``).
        any_model_name: answer requests for unknown models with the default model.
        strict: refuse requests with unknown fields instead of ignoring these fields.
        reasoning_budget: end a thought after so many tokens unless the request says otherwise; 0 ends each at
            once, and without it the model ends its thoughts.
        reasoning_budget_message: a text before the mark that ends a thought, unless the request has one.
        playground: serve a page to chat with the models at ``/``.
        cors_origins: web pages of these origins may call the service from a browser; ``*`` is all.
        api_keys: a TOML file of hashed keys (docs/serving.md); requests without a valid key are refused.
        tls_certificate: a file with the service's certificate in PEM; turns on encryption.
        tls_key: a file with the certificate's private key.
        tls_client_ca: a file with CA certificates; clients must have a certificate signed by one.
        max_body_bytes: the largest request body, the largest gRPC message sent, and the most that a request
            fetches.
        max_choices: the maximum number of continuations of one prompt (``n``, ``best_of``).
        max_logprobs: the maximum number of log-probabilities per token.
        max_stored_responses: the maximum number of stored /v1/responses answers.
        shared_memory: let clients of the Open Inference Protocol pass tensors in shared memory; any client
            can then read and write the shared memory objects of this user.
        batch_folder: the folder of files and batches (docs/batch.md); without it, their endpoints are off.
        max_file_bytes: the largest file that may be uploaded.
        body_timeout_seconds: how long a client may take to send a request's head, and then its body; and how
            long the pictures that a request gives by addresses may take.
        image_domains: hosts that pictures are fetched from when a request gives their address: HOST for
            ``https``, or ``http://HOST:PORT``. Other addresses, and private ones of these, are refused.
        stream_interval: send a piece of a stream after this many steps of the engine; larger values cost less
            processor time per token. The first and the last piece are sent at once.
        warm_up: run each model once before it accepts requests.
        log_content: write prompts and answers to the log, in the records of generations.
        ray: serve with Ray Serve on the cluster at this address, over HTTP only; ``local`` starts one on this
            machine (docs/deploy.md).
        replicas: with ``ray``: the number of processes that each load the model.
        max_replicas: with ``ray``: start up to so many replicas while prompts wait, and end them when they
            are idle, down to ``replicas``.
        replica_tokens: with ``max_replicas``: prompt tokens that wait for which there is one replica more.
        replica_gpus: with ``ray``: the GPUs of each replica.
        otel_endpoint: the OpenTelemetry collector that receives traces and metrics over gRPC, such as
            http://127.0.0.1:4317; nothing is sent without it.

    Raises:
        UsageError: a value has the wrong type or is out of range.
    """

    host: str = "127.0.0.1"
    http_port: int | None = option(8000, least=0, most=65535, flags=("--http-port", "--port"))
    unix_socket: Path | None = None
    grpc_port: int | None = option(8001, least=0, most=65535)
    role: Literal["both", "prefill", "decode"] = "both"
    grace_seconds: float = option(30.0, least=0, flags=("--grace",))
    models: Path | None = None
    models_poll_seconds: float | None = option(None, least=0.1)
    memory_limit: int | None = option(None, least=1, unit="bytes")
    keep_alive_seconds: float | None = option(None, least=1, flags=("--keep-alive",))
    served_model_names: tuple[str, ...] = option((), flags=("--served-model-name",))
    aliases: tuple[str, ...] = option((), flags=("--alias",))
    any_model_name: bool = False
    strict: bool = False
    reasoning_budget: int | None = option(None, least=0)
    reasoning_budget_message: str = ""
    playground: bool = True
    cors_origins: tuple[str, ...] = option((), flags=("--cors-origin",))
    api_keys: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    max_body_bytes: int = option(16 * 2**20, least=1024, unit="bytes")
    max_choices: int = option(128, least=1)
    max_logprobs: int = option(64, least=0)
    max_stored_responses: int = option(1000, least=0)
    shared_memory: bool = False
    batch_folder: Path | None = None
    max_file_bytes: int = option(512 * 2**20, least=1024, unit="bytes")
    body_timeout_seconds: float = option(30.0, least=0.1)
    image_domains: tuple[str, ...] = option((), flags=("--image-domain",))
    stream_interval: int = option(1, least=1)
    warm_up: bool = True
    log_content: bool = False
    ray: str | None = None
    replicas: int = option(1, least=1)
    max_replicas: int | None = option(None, least=1)
    replica_tokens: int = option(8192, least=1)
    replica_gpus: float = option(0.0, least=0)
    otel_endpoint: str | None = None

    def names_for(self, model: str | None) -> dict[str, str]:
        """Return the models by their further names.

        Args:
            model: the only model; None if there are several.
        """
        named = {} if model is None else dict.fromkeys(self.served_model_names, model)
        return named | {name: target for name, _, target in (alias.partition("=") for alias in self.aliases)}

    def __post_init__(self) -> None:
        """Check each value, then the values that depend on each other."""
        Checked.__post_init__(self)
        if self.http_port is None and self.grpc_port is None:
            raise UsageError("neither http_port nor grpc_port is set, so nothing would be served")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise UsageError("tls_certificate and tls_key belong together; one of them is not set")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise UsageError("tls_client_ca has no meaning without tls_certificate and tls_key")
        for alias in self.aliases:
            if not all(alias.partition("=")):
                raise UsageError(f"an alias must be NAME=MODEL, not {alias!r}")
        for domain in self.image_domains:
            if not _IMAGE_DOMAIN.fullmatch(domain):
                raise UsageError(
                    f"an image domain must be HOST, https://HOST:PORT or http://HOST:PORT in lower case, not "
                    f"{domain!r}"
                )
        if self.ray is None and (self.replicas > 1 or self.replica_gpus or self.max_replicas is not None):
            raise UsageError("replicas, max_replicas and replica_gpus have no meaning without ray")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise UsageError(f"max_replicas is {self.max_replicas}, less than the {self.replicas} replicas")
        if self.otel_endpoint is not None and not _ENDPOINT.fullmatch(self.otel_endpoint):
            raise UsageError(
                f"otel_endpoint is {self.otel_endpoint!r}; it must be http://HOST:PORT or https://HOST:PORT"
            )
