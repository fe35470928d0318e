"""Variables of LMCache become options of the engine, below carryall's own; others are named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from carryall.cli.lmcache_variables import lmcache_options
from carryall.cli.load_options import Chosen, config_options
from carryall.errors import UsageError


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({}, {}),
        ({"LMCACHE_LOCAL_CPU": "True"}, {"swap_bytes": 5 << 30}),
        ({"LMCACHE_MAX_LOCAL_CPU_SIZE": "2.5"}, {"swap_bytes": 5 << 29}),
        ({"LMCACHE_LOCAL_CPU": "false", "LMCACHE_MAX_LOCAL_CPU_SIZE": "2.5"}, {"swap_bytes": 0}),
        (
            {"LMCACHE_LOCAL_DISK": "file:///var/kv", "LMCACHE_MAX_LOCAL_DISK_SIZE": "10"},
            {"prefix_cache_dir": "/var/kv", "prefix_cache_bytes": 10 << 30},
        ),
        ({"LMCACHE_REMOTE_URL": "redis://store:6379"}, {"prefix_cache_url": "redis://store:6379"}),
        ({"LMCACHE_REMOTE_URL": "fs://host:0/mnt/kv"}, {"prefix_cache_url": "file:///mnt/kv"}),
        ({"LMCACHE_REMOTE_URL": ""}, {}),
        ({"OTHER_LMCACHE_LOCAL_CPU": "true"}, {}),
    ],
)
def test_each_variable_is_an_option(variables: dict[str, str], options: dict[str, Any]) -> None:
    assert lmcache_options(variables) == options


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("LMCACHE_LOCAL_CPU", "maybe", "must be true or false"),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", "-1", "must be a number of GB"),
        ("LMCACHE_MAX_LOCAL_DISK_SIZE", "nan", "must be a number of GB"),
        ("LMCACHE_MAX_LOCAL_DISK_SIZE", "inf", "must be a number of GB"),
        ("LMCACHE_LOCAL_DISK", "s3://bucket", "must be file:///FOLDER"),
        ("LMCACHE_REMOTE_URL", "lm://host:65432", "no client for lm://"),
        ("LMCACHE_REMOTE_URL", "mooncakestore://host:1", "no client for mooncakestore://"),
    ],
)
def test_values_that_cannot_be_used_are_refused(variable: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        lmcache_options({variable: value})
    assert variable in str(error.value)
    assert value in str(error.value)


def test_variables_without_a_counterpart_are_named(caplog: pytest.LogCaptureFixture) -> None:
    variables = {
        "LMCACHE_CHUNK_SIZE": "256",
        "LMCACHE_REMOTE_SERDE": "naive",
        "LMCACHE_ENABLE_BLENDING": "true",
        "LMCACHE_CACHE_POLICY": "LRU",
    }
    with caplog.at_level(logging.WARNING):
        assert lmcache_options(variables) == {}
    (line,) = caplog.messages
    assert line.endswith(": LMCACHE_CHUNK_SIZE=256, LMCACHE_ENABLE_BLENDING=true")


def test_own_flags_and_variables_come_first(tmp_path: Path) -> None:
    seen: list[Chosen] = []

    @click.command()
    @config_options(prefix_cache_dir="auto")
    def show(chosen: Chosen) -> None:
        seen.append(chosen)

    theirs = {"LMCACHE_MAX_LOCAL_CPU_SIZE": "1", "LMCACHE_LOCAL_DISK": f"file://{tmp_path}"}
    for own, environment in (([], {}), (["--swap-bytes", "7"], {}), ([], {"CARRYALL_SWAP_BYTES": "8"})):
        done = CliRunner().invoke(show, ["M", *own], env={**theirs, **environment})
        assert done.exit_code == 0, done.output
    assert [chosen.engine.swap_bytes for chosen in seen] == [1 << 30, 7, 8]
    assert {chosen.engine.prefix_cache_dir for chosen in seen} == {tmp_path}  # in place of the default
