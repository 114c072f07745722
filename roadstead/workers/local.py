"""Where a run keeps things on one machine, and where its engines are. Everything here can be lost: S3 and Temporal have
the truth."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from roadstead.config import ConfigError, RunConfig


@dataclass(frozen=True)
class EnginePlace:
    """One engine of this machine's rollout worker."""

    name: str
    """Of its process and its log, for one that is started here."""
    engine_id: str
    """Names it in every row that it generates, and in metrics."""
    url: str
    folder: Path
    """Versions of the weights, two at a time. Its own: who removes old versions must not remove another engine's."""
    port: int | None
    """None: a server of the user's own (engine.urls)."""


def engines(config: RunConfig, folder: Path) -> list[EnginePlace]:
    """`engine.replicas` servers on ports in a row from `engine.port`, or those of `engine.urls`.

    Raises ConfigError for a URL that is none, or that names an engine twice.
    """
    e = config.engine
    if e.urls:
        places = [_own(url, folder) for url in e.urls]
        ids = [place.engine_id for place in places]
        if twice := sorted({i for i in ids if ids.count(i) > 1}):
            raise ConfigError(f"engine.urls: {list(e.urls)} names {', '.join(twice)} twice; give each engine once")
        return places
    names = ["engine"] if e.replicas == 1 else [f"engine-{i}" for i in range(e.replicas)]
    return [
        EnginePlace(name, f"vllm-{port}", f"http://127.0.0.1:{port}", folder / name, port)
        for port, name in enumerate(names, start=e.port)
    ]


def _own(url: str, folder: Path) -> EnginePlace:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # a port that is no number
        port = None
    if port is None or parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"engine.urls: {url!r} is no address of an engine; write http://HOST:PORT")
    # A folder's name too, so nothing that shells and `scp` read as their own.
    engine_id = re.sub(r"[^\w.-]", "-", f"vllm-{parts.hostname}-{port}")
    return EnginePlace(engine_id, engine_id, url, folder / "engine" / engine_id, None)


def trainer_folder(folder: Path) -> Path:
    """The trainer's scratch."""
    return folder / "trainer"


def trainer_socket(folder: Path) -> Path:
    """The trainer's command socket. Unix socket paths end at 107 bytes, so it can't lie in a deep data directory."""
    place = Path(tempfile.gettempdir()) / f"roadstead-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    return place / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}.sock"
