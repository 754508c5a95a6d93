"""A headless Chromium for tests of pages, spoken to through two pipes in its own protocol. No library is needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 300.0


def program() -> str | None:
    """Where the browser is, if this machine has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one open page. Everything that goes wrong on the page is in `errors`, every address that it
    asked for in `requests`."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._numbers = itertools.count(1)
        self._unread = b""
        self._loaded = False
        self._session = ""

    def __enter__(self) -> Self:
        path = program()
        assert path is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The protocol is spoken on the descriptors 3 and 4.
        script = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        arguments = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--no-first-run", f"--user-data-dir={self._folder.name}", "--remote-debugging-pipe", "about:blank"),
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", str(theirs_in), str(theirs_out), path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs_in, theirs_out),
        )
        os.close(theirs_in)
        os.close(theirs_out)
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._session = ""
            self._send("Browser.close")
            self._process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._folder.cleanup()

    def _send(self, method: str, **values: Any) -> int:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return number

    def ask(self, method: str, **values: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        number, end = self._send(method, **values), time.monotonic() + SECONDS
        while True:
            message = self._receive(end)
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                found: dict[str, Any] = message["result"]
                return found

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser did not answer in {SECONDS} seconds"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser ended"
            self._unread += part
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, values: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(values["exceptionDetails"]))
        elif event == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.errors.append(values["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(values["args"]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])

    def open(
        self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False, script: bool = True
    ) -> None:
        """Loads a file in a window of this size."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Emulation.setScriptExecutionDisabled", value=not script)
        self._loaded, end = False, time.monotonic() + SECONDS
        self.ask("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._receive(end)

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is on the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (expression, found)
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Moves the mouse to the middle of an element, and clicks."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{found}.scrollIntoView({{block: 'center'}})")
        box = self.value(f"JSON.parse(JSON.stringify({found}.getBoundingClientRect()))")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def picture(self, path: Path) -> None:
        """The whole page as a PNG file."""
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
