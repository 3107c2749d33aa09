"""Headless Chromium over its debugging pipe: no driver, no network, only the standard library."""

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
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60


def find() -> str | None:
    """The browser in PATH, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab, as a context manager. Messages of the console and uncaught exceptions are kept in `problems`."""

    def __init__(self, executable: str) -> None:
        self.executable = executable
        self.numbers = itertools.count(1)
        self.problems: list[str] = []
        self.loaded = False
        self.buffer = b""

    def __enter__(self) -> Browser:
        self.profile = tempfile.TemporaryDirectory(prefix="graphalign-chromium-", ignore_cleanup_errors=True)
        there, self.to = os.pipe()
        self.back, here = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        command = f'exec 3<&{there} 4>&{here}; exec "$@"'
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
        ]
        self.process = subprocess.Popen(
            ["bash", "-c", command, "chromium", self.executable, *options, f"--user-data-dir={self.profile.name}", "about:blank"],
            pass_fds=(there, here),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(here)
        self.session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.back)
        self.profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result."""
        number = next(self.numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.back], [], [], max(0, end - time.monotonic()))
            data = os.read(self.back, 1 << 20) if ready else b""
            assert data, "Chromium does not answer"
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {json.dumps(params['exceptionDetails'])[:500]}")
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(f"console: {json.dumps(params['args'])[:500]}")
        elif method == "Log.entryAdded":
            self.problems.append(f"log: {params['entry'].get('text')}")
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "about:", "data:")):
            self.problems.append(f"request: {params['request']['url']}")
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {params.get('message')}")
        elif method == "Page.loadEventFired":
            self.loaded = True

    def open(self, page: Path) -> float:
        """Open a file; seconds until its load event."""
        self.loaded, started = False, time.monotonic()
        self.call("Page.navigate", url=page.absolute().as_uri())
        while not self.loaded:
            self._note(self._read())
        return time.monotonic() - started

    def js(self, code: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Set the window's size and the preferred colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def move_to(self, selector: str) -> None:
        """Point at the middle of an element, scrolled into view."""
        box = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center', inline: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def type(self, words: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=words)

    def key(self, name: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def screenshot(self, path: Path, *, full: bool = False) -> None:
        """What is seen, or the whole page, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"]))
