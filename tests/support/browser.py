"""A headless Chromium for tests of pages, driven over its own debugging protocol.

Looked for as $ROADSTEAD_CHROMIUM, then on the path; else Debian's packages are unpacked under .venv/chromium, without
root and once. `NoBrowser` says why there is none.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

_ROOT = Path(__file__).parents[2]
_UNPACKED = _ROOT / ".venv" / "chromium"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FETCH_S, _START_S, _ANSWER_S = 120, 30, 30
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-port=0"),
)
_FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>
<dir>{folder}/usr/share/fonts</dir><dir>/usr/share/fonts</dir><cachedir>{folder}/fontcache</cachedir>
<match><edit name="family" mode="append"><string>Inter</string></edit></match></fontconfig>"""
"""A machine without a desktop has no system-ui; pictures for the docs are drawn with Inter there, named ones aside."""


class NoBrowser(RuntimeError):
    """There is no Chromium and it can't be had."""


@dataclass
class Seen:
    """What a page did while it was opened."""

    messages: list[str] = field(default_factory=list)
    """Console messages, exceptions, violations of its own policy."""
    requests: list[str] = field(default_factory=list)
    """URLs asked for, the page's own left out."""


class Page:
    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0
        self.seen = Seen()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=_ANSWER_S))
            self._note(answer)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, url: str, width: int, height: int = 900, *, dark: bool = False) -> Seen:
        """Open and wait until it is loaded; `seen` begins anew."""
        self.seen = Seen()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=url)
        self._until("Page.loadEventFired")
        self.seen.requests = [asked for asked in self.seen.requests if asked != url and not asked.startswith("data:")]
        return self.seen

    def value(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, height: int | None = None) -> bytes:
        """PNG of the whole page, or of its first `height` pixels."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], height or 1e9), "scale": 1}
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(answer["data"])

    def _until(self, event: str) -> None:
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            answer = json.loads(self._socket.recv(timeout=_ANSWER_S))
            self._note(answer)
            if answer.get("method") == event:
                return
        raise AssertionError(f"{event} did not come within {_ANSWER_S} s")

    def _note(self, answer: dict[str, Any]) -> None:
        method, values = answer.get("method"), answer.get("params", {})
        if method == "Network.requestWillBeSent":
            self.seen.requests.append(values["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.seen.messages.append(str(values["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.seen.messages.append(str(values["args"]))
        elif method == "Log.entryAdded":
            self.seen.messages.append(values["entry"]["text"])


@contextlib.contextmanager
def chromium() -> Iterator[Page]:
    """One page of a fresh browser, which is gone when the block ends. Raises NoBrowser."""
    program, environment = _program()
    with tempfile.TemporaryDirectory() as profile:
        command = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=environment, **quiet)  # type: ignore[call-overload]
        try:
            port = _port(process, Path(profile) / "DevToolsActivePort")
            targets = httpx.get(f"http://127.0.0.1:{port}/json", timeout=_ANSWER_S, trust_env=False).json()
            address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
            with connect(address, max_size=None, proxy=None) as socket:
                page = Page(socket)
                yield page
                page.send("Browser.close")
        finally:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port(process: subprocess.Popen[bytes], file: Path) -> int:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NoBrowser(f"{process.args}: ended with {process.returncode} at once")
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        time.sleep(0.05)
    raise NoBrowser(f"{process.args}: no debugging port within {_START_S} s")


def _program() -> tuple[str, dict[str, str]]:
    names = (os.environ.get("ROADSTEAD_CHROMIUM"), *_NAMES)
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is not None:
        return found, dict(os.environ)
    _UNPACKED.parent.mkdir(exist_ok=True)
    with open(_UNPACKED.with_name("chromium.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (_UNPACKED / "complete").exists():
            _unpack()
    libraries = _UNPACKED / "usr" / "lib" / "x86_64-linux-gnu"
    fonts = _UNPACKED / "fonts.conf"
    fonts.write_text(_FONTS.format(folder=_UNPACKED))
    environment = dict(os.environ) | {
        "LD_LIBRARY_PATH": f"{libraries}:{libraries / 'pulseaudio'}",
        "FONTCONFIG_FILE": str(fonts),
    }
    return str(_UNPACKED / "usr" / "lib" / "chromium" / "chromium"), environment


def _unpack() -> None:
    """Debian's chromium and what it lacks here, about 110 MB, without installing anything."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise NoBrowser("no chromium on the path, and no apt-get to fetch one; set ROADSTEAD_CHROMIUM to a browser")
    shutil.rmtree(_UNPACKED, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            plan = _answer(folder, "apt-get", "install", "-s", "--no-install-recommends", "chromium", "fonts-inter")
            packages = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
            _answer(folder, "apt-get", "download", *packages)
            for package in sorted(Path(folder).glob("*.deb")):
                _answer(folder, "dpkg", "-x", str(package), str(_UNPACKED))
        except (subprocess.SubprocessError, OSError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            raise NoBrowser(f"chromium can't be fetched with apt-get: {str(reason).strip()[-300:]}") from error
    (_UNPACKED / "complete").touch()


def _answer(folder: str, *command: str) -> str:
    environment = dict(os.environ) | {"LC_ALL": "C"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_FETCH_S, check=True
    )
    return done.stdout
