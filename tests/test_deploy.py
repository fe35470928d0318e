"""The files of ``deploy/``: options and paths that exist, queries by real metrics, and a real Prometheus."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from http_serving import http_serving
from null_llm import null_llm
from prometheus_client.parser import text_string_to_metric_families

from carryall.cli.load_options import SERVER_TABLES, VARIABLES
from carryall.cli.verbs.serve import command
from carryall.options import declared

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
OWN_VARIABLES = {"CARRYALL_BUILD_KERNELS", "CARRYALL_CACHE", "CARRYALL_LOG", "CARRYALL_LOG_FORMAT"}
_METRIC = re.compile(r"\b((?:vllm|carryall):\w+|process_\w+)")


def loaded(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text(encoding="utf-8"))


def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana/carryall.json").read_text(encoding="utf-8"))


def queries() -> list[str]:
    """All queries of the dashboard and of the autoscaler."""
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    found += [variable["query"] for variable in dashboard()["templating"]["list"]]
    rule = loaded("kubernetes/adapter.yaml")["rules"]["custom"][0]
    return [*found, rule["seriesQuery"], rule["metricsQuery"]]


def metrics(text: str) -> set[str]:
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def test_queries_are_about_metrics_that_exist() -> None:
    async def scenario() -> str:
        async with null_llm(step_seconds=0.002) as llm, http_serving(llm) as served:
            await served.events("/v1/completions", prompt="x", max_tokens=20, ignore_eos=True, stream=True)
            return (await served.client.get("/metrics")).text

    served = metrics(asyncio.run(scenario()))
    asked = {name for query in queries() for name in _METRIC.findall(query)}
    assert len(asked) > 15
    assert asked - served == set()


def test_arguments_and_variables_are_those_of_the_command() -> None:
    flags = {flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")}
    variables = {VARIABLES + name.upper() for owner in SERVER_TABLES.values() for name in declared(owner)}
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    assert len(files) > 10
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    lines = [
        line
        for line in text.splitlines()
        if "carryall serve" in line or "args:" in line or "command:" in line
    ]
    used = {flag for line in lines for flag in re.findall(r"--[a-z][a-z-]+", line)}
    assert used >= {"--config", "--grace"}
    assert used - flags == set()
    assert set(re.findall(r"CARRYALL_[A-Z_]+", text)) - variables - OWN_VARIABLES == set()


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images_run_without_privileges_and_their_extras_exist(name: str) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (asked,) = re.findall(r"\.whl\)\[([\w,]+)\]", text)
    assert set(asked.split(",")) <= extras.keys()
    assert re.search(r"^USER [1-9]\d*$", text, re.MULTILINE)
    assert json.loads(text.rpartition("ENTRYPOINT ")[2].splitlines()[0]) == ["carryall", "serve"]


def test_probes_and_ports_are_the_service_s() -> None:
    async def paths() -> dict[str, int]:
        async with null_llm() as llm, http_serving(llm) as served:
            return {path: (await served.client.get(path)).status_code for path in asked}

    deployment, service = loaded("kubernetes/deployment.yaml"), loaded("kubernetes/service.yaml")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    asked = {probe["path"] for probe in probes} | {pod["metadata"]["annotations"]["prometheus.io/path"]}
    assert set(asyncio.run(paths()).values()) == {200}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    defaults = declared(SERVER_TABLES["server"])
    assert ports == {"http": defaults["http_port"].default, "grpc": defaults["grpc_port"].default}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == ports.keys()
    assert {probe["port"] for probe in probes} <= ports.keys()
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    grace = int(container["args"][container["args"].index("--grace") + 1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > grace + 5  # and the preStop hook
    scaler = loaded("kubernetes/autoscaler.yaml")["spec"]
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    rule = loaded("kubernetes/adapter.yaml")["rules"]["custom"][0]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]
    listed = loaded("kubernetes/kustomization.yaml")["resources"]
    assert all((DEPLOY / "kubernetes" / name).is_file() for name in listed)


def test_compose_mounts_what_exists_and_scrapes_the_service() -> None:
    services = loaded("compose.yaml")["services"]
    for one in services.values():
        for volume in one.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), volume
        assert all(port.startswith("127.0.0.1:") for port in one["ports"])
    (job,) = loaded("prometheus.yml")["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["carryall:8000"]
    uids = {one["uid"] for one in loaded("grafana/datasource.yaml")["datasources"]}
    assert {panel["datasource"]["uid"] for panel in dashboard()["panels"]} == uids


def prometheus(folder: Path) -> Path:
    """The folder of Prometheus' programs: those of the PATH, or of Debian's package."""
    if found := shutil.which("prometheus"):
        return Path(found).parent
    if not shutil.which("apt-get"):
        pytest.skip("there is neither prometheus nor apt-get")
    fetched = subprocess.run(
        ["apt-get", "download", "prometheus"], cwd=folder, capture_output=True, check=False
    )
    packages = list(folder.glob("prometheus_*.deb"))
    if not packages:
        pytest.skip(f"Debian's package cannot be fetched: {fetched.stderr.decode()[-200:]}")
    subprocess.run(["dpkg", "-x", packages[0].name, "."], cwd=folder, check=True)
    return folder / "usr/bin"


@pytest.mark.slow
def test_a_real_prometheus_scrapes_the_service_and_runs_the_dashboard(tmp_path: Path) -> None:
    programs = prometheus(tmp_path)
    subprocess.run([programs / "promtool", "check", "config", DEPLOY / "prometheus.yml"], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def scenario() -> None:
        async with null_llm(step_seconds=0.002) as llm, http_serving(llm) as served:
            config = loaded("prometheus.yml")
            config["global"]["scrape_interval"] = "1s"
            target = served.url.removeprefix("http://")
            config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
            (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
            arguments = [
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'db'}",
            ]
            arguments += [f"--web.listen-address=127.0.0.1:{port}"]
            log = (tmp_path / "log").open("wb")
            process = subprocess.Popen([programs / "prometheus", *arguments], stderr=log, env={**os.environ})
            try:
                await scraped(served, f"http://127.0.0.1:{port}")
            finally:
                process.terminate()
                process.wait(30)
                log.close()

    asyncio.run(scenario())


async def scraped(served: Any, url: str) -> None:
    """Check the dashboard's queries against a Prometheus that scrapes the service."""
    async with httpx2.AsyncClient(base_url=url, timeout=30) as client:

        async def value(query: str) -> list[Any]:
            answer = await client.get("/api/v1/query", params={"query": query})
            assert answer.status_code == 200, (query, answer.text)
            return list(answer.json()["data"]["result"])

        async with asyncio.timeout(90):
            while True:
                await served.events(
                    "/v1/completions", prompt="x", max_tokens=20, ignore_eos=True, stream=True
                )
                try:
                    ready = (await client.get("/-/ready")).status_code == 200  # 503 before
                    if ready and len(await value("rate(vllm:generation_tokens_total[10s])")) == 1:
                        break
                except httpx2.TransportError:
                    pass
                await asyncio.sleep(0.5)
        variables = {"$__rate_interval": "10s", "$model": ".*"}
        for panel in dashboard()["panels"]:
            for target in panel["targets"]:
                query = target["expr"]
                for name, text in variables.items():
                    query = query.replace(name, text)
                assert await value(query), (panel["title"], query)
