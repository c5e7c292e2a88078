"""A headless Chromium over its DevTools protocol: one page, all it complains about, pictures of it.

async with chromium(tmp_path) as browser, browser.page(url) as page: await page.until("document.title === 'x'")
"""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

DEADLINE_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
HOW_TO_INSTALL = (
    "no Chromium: `apt-get install --no-install-recommends chromium` (or set LLAMARACK_CHROMIUM to one), "
    "then `make test-browser`"
)
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync",
    "--no-proxy-server", "--remote-debugging-port=0", "--force-color-profile=srgb",
)  # fmt: skip
_WATCH_POLICY = "addEventListener('securitypolicyviolation', e => (window.violations ??= []).push(e.violatedDirective))"


def executable() -> str | None:
    given = os.environ.get("LLAMARACK_CHROMIUM")
    return given or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. `complaints`: exceptions, console errors and warnings, log entries of the browser."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self.complaints: list[str] = []
        self._browser = browser
        self._session = session

    async def call(self, method: str, **words: Any) -> dict[str, Any]:
        return await self._browser.call(method, words, self._session)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise. Raises AssertionError for its exception."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The first true value; asked in the page at each of its frames or ten times a second."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not (value := await self.evaluate(expression)):
                    await asyncio.sleep(0.05)
                return value
        except TimeoutError:
            text = await self.evaluate("document.body.innerText")
            raise AssertionError(f"not within {DEADLINE_S:g} s: {expression}\nthe page says: {text}") from None

    async def text(self, selector: str) -> str:
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def violations(self) -> list[str]:
        """Of the content security policy."""
        return list(await self.evaluate("window.violations ?? []"))

    async def look(self, *, width: int, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path) -> None:
        """The whole page, from its top to its end; PNG or WebP by the file's name."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = await self.call(
            "Page.captureScreenshot", format=path.suffix[1:], quality=82, clip=clip, captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(answer["data"]))

    def take(self, method: str, words: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = words["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and words["type"] in {"error", "warning", "assert"}:
            self.complaints.append(" ".join(str(each.get("value", each)) for each in words["args"]))
        elif method == "Log.entryAdded" and words["entry"]["level"] in {"error", "warning"}:
            self.complaints.append(f"{words['entry']['text']} {words['entry'].get('url', '')}")


class Browser:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reading = asyncio.create_task(self._read())

    async def call(self, method: str, words: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": number, "method": method, "params": words}
        await self._socket.send_str(json.dumps(message if session is None else {**message, "sessionId": session}))
        async with asyncio.timeout(DEADLINE_S):
            result: dict[str, Any] = await answer
            return result

    @contextlib.asynccontextmanager
    async def page(self, url: str, *, width: int = 1280, **look: Any) -> AsyncIterator[Page]:
        target = (await self.call("Target.createTarget", {"url": "about:blank"}))["targetId"]
        session = (await self.call("Target.attachToTarget", {"targetId": target, "flatten": True}))["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=_WATCH_POLICY)
        await page.look(width=width, **look)
        await page.call("Page.navigate", url=url)
        await page.until("document.readyState === 'complete'")
        try:
            yield page
        finally:
            await self.call("Target.closeTarget", {"targetId": target})

    async def _read(self) -> None:
        async for message in self._socket:
            value = json.loads(message.data)
            if "id" in value:
                answer = self._waiting.pop(value["id"])
                if answer.cancelled():
                    continue
                if "error" in value:
                    answer.set_exception(AssertionError(value["error"]))
                else:
                    answer.set_result(value["result"])
            elif value.get("sessionId") in self._pages:
                self._pages[value["sessionId"]].take(value["method"], value["params"])

    async def stop(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@contextlib.asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Browser]:
    """`folder`: for its profile; nothing of it is left running."""
    path = executable()
    assert path is not None, HOW_TO_INSTALL
    profile = folder / "chromium"
    profile.mkdir()
    with (folder / "chromium.log").open("wb") as log:
        argv = [path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, "HOME": str(folder)})  # noqa: ASYNC220
    try:
        port_file = profile / "DevToolsActivePort"
        async with asyncio.timeout(DEADLINE_S):
            while not port_file.exists() or port_file.read_text().count("\n") < 1:
                assert process.poll() is None, (folder / "chromium.log").read_text()
                await asyncio.sleep(0.05)
        port, path_of_socket = port_file.read_text().split("\n")[:2]
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"ws://127.0.0.1:{port}{path_of_socket}", max_msg_size=0) as socket,
        ):
            browser = Browser(socket)
            try:
                yield browser
            finally:
                with contextlib.suppress(AssertionError, TimeoutError, ConnectionError):
                    await browser.call("Browser.close", {})
                await browser.stop()
    finally:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
