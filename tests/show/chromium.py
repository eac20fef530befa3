"""A headless Chromium, driven by the DevTools protocol over two pipes: what a reader of a page sees and does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars"),
)


def chromium() -> str | None:
    """The program, where there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One tab. `events` has what the browser told of it since the last page was opened, by method."""

    def __init__(self, profile: Path) -> None:
        program = chromium()
        assert program is not None
        read, out = os.pipe()
        back, write = os.pipe()
        script = f'exec "$@" 3<&{read} 4>&{write}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._out, self._in = os.fdopen(out, "wb", buffering=0), os.fdopen(back, "rb")
        self._rest, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        try:
            self._attach()
        except BaseException:
            self._end()
            raise

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser, and wait for the answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        self._out.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._in.fileno(), 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, page: Path) -> None:
        """Open a file, and wait until it is loaded."""
        self.events = []
        self.call("Page.navigate", url=page.as_uri())
        while not self.told("Page.loadEventFired"):
            self.events.append(self._next())

    def told(self, *methods: str) -> list[dict[str, Any]]:
        """What was told under these names."""
        return [each["params"] for each in self.events if each.get("method") in methods]

    def run(self, script: str) -> Any:
        """The value of a script in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def see(self, *, dark: bool = False, width: int = 1280, media: str = "screen") -> None:
        """Look at the page in another theme, width or medium."""
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[theme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )

    def click(self, selector: str) -> None:
        """Click in the middle of an element with the mouse."""
        place = self.run(
            f"(() => {{ const each = document.querySelector({json.dumps(selector)});"
            "each.scrollIntoView({block: 'center'}); const box = each.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", buttons=1, clickCount=1
            )

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def close(self) -> None:
        """End the browser."""
        self._out.write(json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        self._end()

    def _end(self) -> None:
        """A browser whose pipes are closed ends by itself."""
        self._out.close()
        self._in.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
