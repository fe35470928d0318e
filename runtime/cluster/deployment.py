"""Deploy the service with Ray Serve."""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from dataclasses import replace
from typing import Any

from ...errors import MissingExtraError, ServiceUnavailableError, UsageError
from ...records import dataclass
from ..process.ray_cluster import LOCAL, connect, ship
from ..service.core.config import ServerConfig
from .replica import Front, Replica, ReplicaSpec

NAME = "carryall"
_OWNER = b"carryall.owner"  # the key of the newest deployment's owner; Ray Serve does not tell it
# Finds the replica with the prompt in its cache, else maps equal session ids to equal replicas.
_ROUTER = f"{__package__}.router:PrefixRouter"
# Seconds after which replicas are added and removed: loading one takes as long, and an idle one costs little.
_GROW_SECONDS, _SHRINK_SECONDS = 10.0, 300.0
_FRONT_REQUESTS = 10_000
# Seconds that a replica has to finish its requests when it is replaced; Ray's own 20 s would cut off streams.
_DRAIN_SECONDS = 600.0
# Ray's HTTP proxy calls a front by gRPC, which takes two thirds of the time of an actor call. Ray reads the
# variable when a process starts. On one machine only: calls to a lost machine took 60 s to fail, not 10 s.
_BY_GRPC = "RAY_SERVE_PROXY_USE_GRPC"
# Options of the process that listens, or of several models.
_UNSUPPORTED = ("models", "tls_certificate", "batch_folder", "shared_memory", "memory_limit", "otel_endpoint")


@dataclass(frozen=True, slots=True)
class Deployed:
    """A deployment of this process.

    Args:
        address: where requests are accepted.
        owner: differs from the owners of other deployments.
    """

    address: str
    owner: bytes


def deploy(spec: ReplicaSpec) -> Deployed:
    """Start the replicas and an HTTP proxy, and return when requests are accepted.

    If the cluster serves already, its replicas are replaced one after the other, while others answer.

    Args:
        spec: what to serve; ``spec.server`` has the cluster's address and the number of replicas.

    Raises:
        MissingExtraError: Ray Serve is not installed.
        UsageError: there is no cluster, or an option cannot be used with it.
        ServiceUnavailableError: the replicas do not start.
    """
    server = spec.server
    for name in _UNSUPPORTED:
        if getattr(server, name):
            raise UsageError(f"--{name.replace('_', '-')} cannot be used with --ray")
    address = server.ray or LOCAL
    if address == LOCAL:
        os.environ.setdefault(_BY_GRPC, "1")
    ray = connect(address)
    _check_resources(ray, server)
    serve = _ray_serve()
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    archive = ship(str(spec.model.model))
    if archive is not None:
        spec = replace(spec, archive_name=hashlib.sha256(archive).hexdigest()[:32])
    port = server.http_port or _free_port(server)
    serve.start(http_options={"host": server.host, "port": port})
    replicas, front = _replicas(serve, spec), _front(serve, ray)
    packed = None if archive is None else ray.put(archive)
    deployed = Deployed(f"{server.host}:{port}", uuid.uuid4().bytes)
    former = _internal_kv_get(_OWNER) if NAME in serve.status().applications else None
    _internal_kv_put(_OWNER, deployed.owner)
    try:
        serve.run(front.bind(replicas.bind(spec, packed), server), name=NAME, route_prefix="/")
    except RuntimeError as error:
        reason = _reason(serve)
        if former is None:
            remove(deployed)
        else:  # its other replicas go on
            _internal_kv_put(_OWNER, former)
            ray.shutdown()
        raise ServiceUnavailableError(f"Ray Serve cannot start the replicas: {reason}") from error
    return deployed


def _ray_serve() -> Any:
    """Import and return Ray Serve.

    Raises:
        MissingExtraError: it is not installed, or has no routers.
    """
    try:
        from ray import serve
        from ray.serve.config import RequestRouterConfig  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("carryall serve --ray", "ray[serve]", "ray") from error
    return serve


def _replicas(serve: Any, spec: ReplicaSpec) -> Any:
    """Return the deployment of the replicas."""
    from ray.serve.config import RequestRouterConfig

    waiting, server = spec.engine.max_queue, spec.server
    number: dict[str, Any] = {"num_replicas": server.replicas}
    if server.max_replicas is not None:
        number = {"autoscaling_config": _autoscaling(server, server.max_replicas)}
    return serve.deployment(
        Replica,
        name="replica",
        **number,
        max_ongoing_requests=_FRONT_REQUESTS if waiting is None else max(1, waiting),
        ray_actor_options={"num_cpus": 1, "num_gpus": server.replica_gpus},
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        graceful_shutdown_timeout_s=_DRAIN_SECONDS,
    )


def _autoscaling(server: ServerConfig, most: int) -> Any:
    """Return how the number of replicas follows the prompt tokens that wait."""
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    return AutoscalingConfig(
        min_replicas=server.replicas,
        initial_replicas=server.replicas,
        max_replicas=most,
        upscale_delay_s=_GROW_SECONDS,
        downscale_delay_s=_SHRINK_SECONDS,
        policy=AutoscalingPolicy(
            policy_function=f"{__package__}.autoscaling:WaitingTokens",
            policy_kwargs={"tokens_per_replica": server.replica_tokens},
        ),
    )


def _front(serve: Any, ray: Any) -> Any:
    """Return the deployment of the front, with a copy for each node.

    It only passes bytes on, so it does not take a processor from the replicas. Ray spreads the copies over
    the nodes, and a node's proxy prefers the one beside it: a lost node stops no other.
    """
    return serve.deployment(
        Front,
        name="front",
        num_replicas=sum(node["Alive"] for node in ray.nodes()),
        max_ongoing_requests=_FRONT_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=_DRAIN_SECONDS,
    )


def _check_resources(ray: Any, server: ServerConfig) -> None:
    """Check that a cluster of this machine has what the replicas need; other clusters may grow.

    Raises:
        UsageError: the replicas would wait forever.
    """
    resources = ray.cluster_resources()
    for name, each in (("CPU", 1.0), ("GPU", server.replica_gpus)):
        if server.ray == LOCAL and server.replicas * each > resources.get(name, 0.0):
            raise UsageError(
                f"{server.replicas} replicas need {server.replicas * each:g} {name}s, but this machine has "
                f"{resources.get(name, 0.0):g}; choose fewer --replicas"
            )


def _reason(serve: Any) -> str:
    """Return the last line of what Ray Serve tells about a deployment that failed."""
    parts = serve.status().applications[NAME].deployments.values()
    told = "\n".join(part.message for part in parts if part.status == "DEPLOY_FAILED")
    errors = [line.strip() for line in told.splitlines() if "Error" in line]
    return errors[-1] if errors else "see the logs of Ray"


def remove(deployed: Deployed) -> None:
    """End a deployment, unless it was replaced, and leave the cluster; running requests may finish first."""
    import ray
    from ray import serve
    from ray.experimental.internal_kv import _internal_kv_get

    if _internal_kv_get(_OWNER) == deployed.owner:
        serve.delete(NAME)
    if not serve.status().applications:  # none of others; the next deployment may choose another address
        serve.shutdown()
    ray.shutdown()


def _free_port(server: ServerConfig) -> int:
    with socket.socket() as found:
        found.bind((server.host, 0))
        port: int = found.getsockname()[1]
        return port
