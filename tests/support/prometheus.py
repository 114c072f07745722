"""A real Prometheus for tests, and what it says. Without its binaries tests fail, and say how to get them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from roadstead.infra.ports import LOOPBACK, free_port
from roadstead.infra.processes import ManagedProcess
from roadstead.infra.prometheus_server import binary, prometheus_spec

_STOP_S = 20


def promtool(*arguments: str) -> str:
    """Its output. Fails the test with it when it says no."""
    answer = subprocess.run([binary("promtool"), *arguments], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


class Prometheus:
    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=30)
        self.url = url

    def ask(self, path: str, **parameters: Any) -> Any:
        answer = self._client.get(f"/api/v1/{path}", params=parameters)
        body = answer.json()
        assert body["status"] == "success", f"{parameters}: {body}"
        return body["data"]

    def now(self, expression: str) -> list[dict[str, Any]]:
        """Series of an instant query."""
        return self.ask("query", query=expression)["result"]

    def range(self, expression: str, start: float, end: float, step: float = 1.0) -> list[dict[str, Any]]:
        return self.ask("query_range", query=expression, start=start, end=end, step=step)["result"]

    def rules(self) -> dict[str, dict[str, Any]]:
        return {rule["name"]: rule for group in self.ask("rules")["groups"] for rule in group["rules"]}


@contextlib.contextmanager
def running(folder: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    """A Prometheus with that configuration (JSON is YAML) for the length of the block."""
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(config))
    promtool("check", "config", str(file))
    port = free_port()
    server = ManagedProcess(prometheus_spec(folder / "tsdb", file, port, folder / "prometheus.log"))
    server.start()
    try:
        _in_a_loop_of_its_own(server.wait_ready())
        yield Prometheus(f"http://{LOOPBACK}:{port}")
    finally:
        _in_a_loop_of_its_own(server.stop())


def _in_a_loop_of_its_own(work: Any) -> None:
    """The tests' own loop may be running in this thread."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(_STOP_S + 40)
    assert not thread.is_alive(), "Prometheus neither started nor stopped"
    if failures:
        raise failures[0]
