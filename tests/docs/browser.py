"""A headless Chromium, driven over two pipes by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["DESKTOP", "PHONE", "Browser", "chromium", "opened"]

PHONE = (390, 844)
DESKTOP = (1280, 900)
TIMEOUT_S = 60.0


def chromium() -> str | None:
    """Return the path of Chromium, or None if this machine has none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """One page of a browser."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._received, self._number = b"", 0
        self._session: str | None = None
        self.complaints: list[str] = []
        """Warnings, errors and exceptions that pages wrote to the console."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> None:
        """Load a page and wait until its scripts have run."""
        width, height = size
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=size == PHONE,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])
        self._call("Page.navigate", url=url)
        self.wait_for(f"document.readyState == 'complete' && location.href == {json.dumps(url)}")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Return the value of an expression as soon as it is true."""
        end = time.monotonic() + TIMEOUT_S
        while not (value := self.evaluate(expression)):
            if time.monotonic() > end:
                raise TimeoutError(expression)
            time.sleep(0.05)
        return value

    def picture(self) -> bytes:
        """Return the visible part of the page as a PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot")["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._listen(answer.get("method", ""), answer.get("params", {}))

    def _listen(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(params["args"])[:500])
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url')}")

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser has not answered for {TIMEOUT_S} s")
            part = os.read(self._read, 1 << 16)
            if not part:
                raise ConnectionError("the browser has ended")
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """Start a browser, which reads commands from descriptor 3 and answers on 4."""
    commands, write = os.pipe()
    read, answers = os.pipe()
    program = [chromium() or "chromium", "--headless=new", "--no-sandbox", "--disable-gpu"]
    program += ["--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "bash", *program],
        pass_fds=(commands, answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(answers)
    try:
        yield Browser(read, write)
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
        os.close(read)
        os.close(write)
