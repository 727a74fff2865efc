"""A headless Chromium, driven by the DevTools protocol over two pipes. It needs no driver and no port."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
WAIT_SECONDS = 20


def find_chromium() -> str | None:
    """Return the browser's path, or None if no browser is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A page of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.send(method, self._session, **parameters)

    async def open(self, url: str) -> None:
        """Navigate to an address."""
        await self.send("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """Evaluate an expression in the page and return its value."""
        response = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in response, response["exceptionDetails"]
        return response["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true, and return its value."""
        value = None
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not value:
                    with contextlib.suppress(AssertionError):  # the page may not be loaded yet
                        value = await self.run(script)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            body = await self.run("document.body.innerText")
            raise AssertionError(f"{script} did not come true; the page says: {body}") from None
        return value

    async def key(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if kind == "keyDown" else {}
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, **text)

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the window's size and the preferred color scheme."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path) -> None:
        """Write a screenshot as PNG."""
        response = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(  # noqa: ASYNC240 - a small file
            base64.b64decode(response["data"])
        )


class Browser:
    """The browser's process, with the responses and events that it sends."""

    def __init__(self, reader: asyncio.StreamReader, writing: int) -> None:
        self._reader, self._writing = reader, writing
        self._next = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        response = self._waiting[self._next] = asyncio.get_running_loop().create_future()
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(WAIT_SECONDS):
            return await response

    async def listen(self) -> None:
        """Read messages until the browser ends."""
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if "id" in message:
                response = self._waiting.pop(message["id"])
                if response.done():
                    continue
                if "error" in message:
                    response.set_exception(AssertionError(message["error"]))
                else:
                    response.set_result(message["result"])
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                entry = message["params"].get("entry", {})
                if message["method"] == "Runtime.exceptionThrown" or entry.get("source") == "security":
                    page.errors.append(str(message["params"]))
                elif message["method"] == "Page.javascriptDialogOpening":
                    self._accept = asyncio.ensure_future(page.send("Page.handleJavaScriptDialog", accept=True))

    async def page(self) -> Page:
        """Open a new page."""
        target = await self.send("Target.createTarget", url="about:blank")
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            await page.send(f"{domain}.enable")
        return page


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Browser]:
    """A running browser, with its profile in `folder`. It is closed on exit."""
    path = find_chromium()
    assert path is not None
    to_read, to_write = os.pipe(), os.pipe()

    def prepare() -> None:
        os.dup2(to_read[0], 3)
        os.dup2(to_write[1], 4)

    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    flags += ["--no-first-run", "--disable-background-networking", "--no-proxy-server", f"--user-data-dir={folder}"]
    high = [os.dup(fd) for fd in (to_read[0], to_write[1])]  # copies with higher numbers, since 3 and 4 are overwritten
    process = await asyncio.create_subprocess_exec(
        path,
        *flags,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        preexec_fn=prepare,
        pass_fds=(3, 4),
    )
    for fd in (*high, to_read[0], to_write[1]):
        os.close(fd)
    reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(to_write[0], "rb")
    )
    browser = Browser(reader, to_read[1])
    listening = asyncio.ensure_future(browser.listen())
    try:
        yield browser
    finally:
        with contextlib.suppress(AssertionError, TimeoutError, OSError):
            await browser.send("Browser.close")
        listening.cancel()
        transport.close()
        os.close(to_read[1])
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
