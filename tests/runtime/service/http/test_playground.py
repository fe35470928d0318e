"""The page at ``/``: what it may load, and, in a real Chromium, that one can chat on it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from http_serving import HttpServed, http_serving
from null_llm import null_llm
from PIL import Image
from scripted_model import Call, Turn, scripted_llm
from tiny_vlms import write_vlm
from vision_golden import picture

from carryall import LLM, AsyncLLM, SamplingParams
from carryall.runtime.tasks.export import export

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def test_the_page_runs_its_own_script_and_nothing_of_others() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.client.get("/")
            policy = answer.headers["content-security-policy"]
            (script,) = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
            assert f"script-src 'sha256-{digest}'" in policy
            assert "default-src 'none'" in policy
            assert (
                re.findall(r"(?:src|href)\s*=\s*[\"']?(?!data:)[^\"' >]+", answer.text.replace(script, ""))
                == []
            )
            assert "innerHTML =" not in script

    asyncio.run(scenario())


def test_the_page_can_be_switched_off() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, playground=False) as served:
            assert (await served.client.get("/")).status_code == 405  # TGI's clients POST there

    asyncio.run(scenario())


@asynccontextmanager
async def opened(served: HttpServed) -> AsyncIterator[tuple[Any, list[str]]]:
    """The page in a browser, and what went wrong in it."""
    playwright = pytest.importorskip("playwright.async_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH")
    faults: list[str] = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
        await page.goto(served.url)
        await page.locator("#model option").wait_for(state="attached")
        yield page, faults
        await browser.close()


@pytest.mark.slow
def test_a_chat_is_streamed_counted_continued_and_stopped() -> None:
    async def scenario() -> None:
        slow: dict[str, Any] = {"max_slots": 1, "step_seconds": 0.05}
        async with null_llm(**slow) as llm, http_serving(llm) as served, opened(served) as (page, faults):
            await page.fill("#max_tokens", "12")
            await page.fill("#prompt", "Hi")
            await page.press("#prompt", "Enter")
            idle = page.locator('#send:text-is("Send")')
            await idle.wait_for()
            facts = await page.locator(".turn.assistant .facts").inner_text()
            told = r"12 tokens, first after \d+ ms, [\d.]+ tokens/s, 0 of \d+ prompt tokens from the cache"
            assert re.fullmatch(told, facts), facts
            assert await page.locator(".turn.user .body").inner_text() == "Hi"
            await page.fill("#max_tokens", "4000")
            await page.fill("#prompt", "More")
            await page.press("#prompt", "Enter")
            await page.locator('#send:text-is("Stop")').wait_for()
            await page.locator('#live:has-text("1 running")').wait_for()
            await page.keyboard.press("Escape")
            await idle.wait_for()
            async with asyncio.timeout(30):
                while llm.stats().running:
                    await asyncio.sleep(0.01)
            await page.fill("#temperature", "-1")
            await page.fill("#prompt", "x")
            await page.press("#prompt", "Enter")
            await page.locator('.turn.error:has-text("temperature must be")').wait_for()
            assert [fault for fault in faults if "status of 400" not in fault] == []

    asyncio.run(scenario())


@pytest.mark.slow
def test_calls_thoughts_and_cache_hits_are_shown(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {
        "type": "object", "properties": {"zone": {"type": "string"}}}}}  # fmt: skip

    def rule(turns: list[Turn]) -> str | Call:
        if turns[-2].text.endswith("time?"):
            return Call("now", {"zone": "UTC"})
        return "<thought>\nThe user greets.\n</thought>\n\nHello **you**."

    async def scenario() -> None:
        async with (
            scripted_llm(tmp_path, rule, thoughts="thoughts") as llm,
            http_serving(llm) as served,
            opened(served) as (page, faults),
        ):
            idle = page.locator('#send:text-is("Send")')
            await page.evaluate(
                "text => { document.getElementById('tools').value = text; }", json.dumps([tool])
            )
            for number, text in enumerate(("Hi", "What is the time?")):
                await page.fill("#prompt", text)
                await page.press("#prompt", "Enter")
                await page.locator(".turn.assistant .facts").nth(number).wait_for()
                await idle.wait_for()
            first, second = [page.locator(".turn.assistant").nth(number) for number in range(2)]
            assert await first.locator("strong").inner_text() == "you"
            assert await first.locator("details summary").inner_text() == "Reasoning"
            assert await first.locator("details .thought").text_content() == "The user greets."
            assert await second.locator(".call").inner_text() == 'now({"zone": "UTC"})'
            cached = re.search(r", (\d+) of (\d+) prompt tokens", await second.locator(".facts").inner_text())
            assert cached is not None
            assert 0 < int(cached[1]) < int(cached[2])
            if folder := os.environ.get("CARRYALL_SCREENSHOTS"):
                await first.locator("details summary").click()
                await page.screenshot(path=str(Path(folder, "playground.png")))
            assert faults == []

    asyncio.run(scenario())


# Shows a file to the page as a drop or a paste does, whose events a script may not fill otherwise.
SHOW = """([kind, target, data]) => {
  const bytes = Uint8Array.from(atob(data), one => one.charCodeAt(0)), moved = new DataTransfer();
  moved.items.add(new File([bytes], kind + ".png", { type: "image/png" }));
  const event = kind === "paste" ? new ClipboardEvent(kind, { clipboardData: moved, bubbles: true })
    : new DragEvent(kind, { dataTransfer: moved, bubbles: true, cancelable: true });
  document.querySelector(target).dispatchEvent(event);
}"""


@pytest.mark.slow
def test_pictures_are_dropped_pasted_chosen_and_removed(tmp_path: Path) -> None:
    export(write_vlm(tmp_path / "checkpoint"), tmp_path / "package")
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for number, file in enumerate(files):
        Image.fromarray(picture(40 + 30 * number, 90)).save(file)
    data = [base64.b64encode(file.read_bytes()).decode() for file in files]

    parts: list[dict[str, Any]] = [{"type": "image", "image": file} for file in files[:2]]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "Read."}]}]
    options: dict[str, Any] = {"provider": "cpu", "kv_cache_dtype": "float32"}
    with LLM(tmp_path / "package", **options) as model:
        (output,) = model.chat(messages, SamplingParams(max_tokens=1))

    async def scenario() -> None:
        llm = AsyncLLM(tmp_path / "package", **options)
        try:
            async with http_serving(llm) as served, opened(served) as (page, faults):
                shown = page.locator("#pictures img")
                await page.set_input_files("#files", files[0])
                await shown.nth(0).wait_for()
                await page.evaluate(SHOW, ["drop", "#log", data[1]])
                await shown.nth(1).wait_for()
                await page.evaluate(SHOW, ["paste", "#prompt", data[2]])
                await shown.nth(2).wait_for()
                await shown.nth(2).click()
                await page.fill("#max_tokens", "1")
                await page.fill("#prompt", "Read.")
                await page.press("#prompt", "Enter")
                await page.locator('#send:text-is("Send")').wait_for()
                facts = await page.locator(".turn.assistant .facts").inner_text()
                assert f"of {len(output.prompt_token_ids)} prompt tokens from the cache" in facts
                sources = await page.locator(".turn.user img").evaluate_all("all => all.map(one => one.src)")
                assert sources == [f"data:image/png;base64,{each}" for each in data[:2]]
                assert await shown.count() == 0
                assert faults == []
        finally:
            llm.shutdown()

    asyncio.run(scenario())


@pytest.mark.slow
def test_markdown_is_shown_and_markup_is_not_run() -> None:
    text = (
        "# Title\n\nA **bold** `code` [link](https://example.org) <img src=x onerror=alert(1)>\n\n"
        "- one\n- two\n\n```python\nx = 1 < 2\n```\n\n| a | b |\n| - | - |\n| 1 | 2 |\n\n"
        "[bad](javascript:alert(1))"
    )

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served, opened(served) as (page, faults):
            script = "text => { const one = el('div', ...markdown(text)); return one.innerHTML; }"
            html = await page.evaluate(script, text)
            for part in (
                "<h3>Title</h3>",
                "<strong>bold</strong>",
                "<code>code</code>",
                "&lt;img src=x onerror=alert(1)&gt;",
                "<ul><li>one</li><li>two</li></ul>",
                "<pre><code>x = 1 &lt; 2</code></pre>",
                "<td>1</td>",
                'href="https://example.org"',
            ):
                assert part in html
            assert 'href="javascript' not in html
            assert faults == []

    asyncio.run(scenario())
