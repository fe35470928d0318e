"""What a reload changes, and what needs a restart."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
from pathlib import Path

import pytest
from api_keys import key_file

from carryall.errors import RateLimitError
from carryall.runtime.service.access.policy import Policy
from carryall.runtime.service.core.caller import Budgets
from carryall.runtime.service.core.config import RELOADED, ServerConfig


def test_the_service_listens_on_this_machine_only_by_default() -> None:
    assert ipaddress.ip_address(ServerConfig().host).is_loopback


def test_settings_that_are_reloaded_exist() -> None:
    assert {field.name for field in dataclasses.fields(ServerConfig)} >= set(RELOADED)


def test_safe_settings_change_and_the_others_are_named(caplog: pytest.LogCaptureFixture) -> None:
    policy = Policy(ServerConfig(max_choices=4, http_port=1))
    with caplog.at_level(logging.INFO, "carryall.runtime.service"):
        policy.reload(ServerConfig(max_choices=2, strict=True, http_port=2))
    assert (policy.config.max_choices, policy.config.strict, policy.config.http_port) == (2, True, 1)
    assert "after a restart only: http_port" in caplog.text
    assert "changed settings: max_choices, strict" in caplog.text
    policy.reload(None)
    assert policy.config.max_choices == 2


def test_changed_limits_keep_what_is_used(tmp_path: Path) -> None:
    file = key_file(tmp_path, a="requests_per_minute = 3\ntokens_per_day = 100")
    keys = Policy(ServerConfig(api_keys=file)).keys
    assert keys is not None
    running = keys.named("a")
    assert running is not None
    for _ in range(3):
        running.budgets.count_request()
    running.budgets.spend(150)

    def reload(text: str) -> Budgets:
        key_file(tmp_path, a=text)
        keys.reload()
        found = keys.named("a")
        assert found is not None
        return found.budgets

    def requests(budgets: Budgets) -> int:
        """The number of requests that are left."""
        for number in range(100):
            try:
                budgets.count_request()
            except RateLimitError:
                return number
        raise AssertionError("no limit")

    raised = reload("requests_per_minute = 5\ntokens_per_day = 100")
    assert requests(raised) == 2
    with pytest.raises(RateLimitError, match="100 tokens a day"):
        raised.check_tokens()  # the limit of another kind stays used up
    lowered = reload("requests_per_minute = 4\ntokens_per_day = 160")
    assert requests(lowered) == 0
    lowered.check_tokens()
    running.budgets.spend(20)  # a request that began before the changes
    with pytest.raises(RateLimitError, match="160 tokens a day"):
        lowered.check_tokens()
    assert requests(reload("requests_per_minute = 9")) == 5
    reload("").count_request()


def test_an_unchanged_key_keeps_what_is_left_of_its_budgets(tmp_path: Path) -> None:
    file = key_file(tmp_path, a="requests_per_minute = 1", b="requests_per_minute = 1")
    keys = Policy(ServerConfig(api_keys=file)).keys
    assert keys is not None
    for key in ("a-key", "b-key"):
        caller = keys.find(key)
        assert caller is not None
        caller.budgets.count_request()
    key_file(tmp_path, a="requests_per_minute = 1\nadmin = true", b="requests_per_minute = 2")
    keys.reload()
    again = keys.find("a-key")
    assert again is not None
    assert again.admin
    with pytest.raises(RateLimitError):
        again.budgets.count_request()
    raised = keys.named("b")
    assert raised is not None
    raised.budgets.count_request()
    assert keys.named("c") is None
