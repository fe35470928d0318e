"""The page of ``examples/browser`` in Chromium: carryall's tokens, by WASM and by WebGPU in software."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers_js import PROMPTS, clear_tokens, library

from carryall import export
from carryall.exporter.demo import demo_path

PAGE = Path(__file__).parents[3] / "examples" / "browser" / "index.html"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DEVICES = {
    "wasm": ["--disable-gpu"],
    "webgpu": ["--enable-unsafe-webgpu", "--enable-features=Vulkan", "--use-webgpu-adapter=swiftshader"],
}
TOKENS = {"wasm": 8, "webgpu": 3}  # WebGPU in software takes seconds for each
SETTLED = "!document.getElementById('generate').disabled || document.querySelector('#status.error')"
MINUTES = 60_000.0  # in milliseconds

pytestmark = pytest.mark.slow


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serve files without a line for each."""

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """The address of the page beside an int4 model, and carryall's new tokens of each prompt."""
    root = tmp_path_factory.mktemp("site")
    (root / "node_modules").symlink_to(library() / "node_modules")
    shutil.copy(PAGE, root)
    export(demo_path(), root / "models" / "web", quantize="int4-fast", layout="transformers.js")
    package = export(demo_path(), root / "package", quantize="int4-fast").path
    expected = dict(zip(PROMPTS, clear_tokens(package, max(TOKENS.values())), strict=True))
    handler = functools.partial(Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", expected
        server.shutdown()


@contextmanager
def opened(address: str, flags: list[str], profile: Path) -> Iterator[tuple[Any, list[str]]]:
    """The page in a browser with a new profile, and the addresses of other hosts that it asked for."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH")
    foreign: list[str] = []
    own = (address.partition("?")[0], "blob:", "data:")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch_persistent_context(
            profile,
            executable_path=CHROMIUM,
            args=[*FLAGS, *flags],
            ignore_default_args=None if "--disable-gpu" in flags else ["--disable-gpu"],
        )
        page = browser.new_page()
        page.on(
            "request", lambda request: None if request.url.startswith(own) else foreign.append(request.url)
        )
        page.goto(address)
        page.wait_for_function(SETTLED, timeout=3 * MINUTES)
        yield page, foreign
        browser.close()


@pytest.mark.parametrize("device", list(DEVICES))
def test_the_page_writes_the_tokens_of_carryall(
    device: str, site: tuple[str, dict[str, list[int]]], tmp_path: Path
) -> None:
    address, expected = site
    with opened(f"{address}?device={device}", DEVICES[device], tmp_path) as (page, foreign):
        status = page.inner_text("#status")
        if "no WebGPU adapter" in status:
            pytest.skip("this Chromium offers no WebGPU adapter in software")
        assert f"web is loaded on {device}" in status
        page.fill("#count", str(TOKENS[device]))
        for prompt, tokens in expected.items():
            page.fill("#prompt", prompt)
            page.click("#generate")
            page.wait_for_function(SETTLED, timeout=4 * MINUTES)
            assert page.inner_text("#status").startswith(f"{TOKENS[device]} tokens, ")
            assert json.loads(page.get_attribute("#text", "data-tokens")) == tokens[: TOKENS[device]]
            assert page.inner_text("#text").startswith(prompt)
        assert foreign == []


@pytest.mark.parametrize(
    ("query", "reason"),
    [("?device=webgpu", "no WebGPU adapter; choose wasm"), ("?model=missing", "cannot load missing: ")],
)
def test_load_errors_are_shown(
    query: str, reason: str, site: tuple[str, dict[str, list[int]]], tmp_path: Path
) -> None:
    with opened(site[0] + query, DEVICES["wasm"], tmp_path) as (page, foreign):
        assert reason in page.inner_text("#status.error")
        assert page.is_disabled("#generate")
        assert foreign == []
