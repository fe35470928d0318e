"""The roles of services that compute prompts and answers apart."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from carryall.cli import carryall

STORE = ("--prefix-cache-url", "file:///kv")
SERVER = ("--prefill-server", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--role", "prefill"), "add --prefix-cache-url"),
        (("--role", "decode", *SERVER), "add --prefix-cache-url"),
        (("--role", "decode", *STORE), "--role decode and --prefill-server belong together"),
        ((*SERVER, *STORE), "--role decode and --prefill-server belong together"),
        (("--role", "prefill", "--http-port", "none", *STORE), "omit --http-port none"),
        (("--role", "prefill", "--port", "none", *STORE), "omit --http-port none"),
        (("--role", "prefill", "--models", ".", *STORE), "omit --models and --ray"),
        (("--role", "prefill", "--ray", "local", *STORE), "omit --models and --ray"),
        (("--role", "both", "--role", "chief"), "role"),
        (("--role", "decode", "--prefill-server", "host:1", *STORE), "prefill_server must be a URL"),
    ],
)
def test_a_role_that_lacks_its_options_is_refused(options: tuple[str, ...], message: str) -> None:
    model = () if "--models" in options else ("draft",)
    done = CliRunner().invoke(carryall, ["serve", *model, "--quiet", *options])
    assert done.exit_code != 0
    assert message in done.output
