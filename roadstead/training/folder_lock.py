"""One trainer a folder.

Owns: the folder's lock. Never touches: torch, the store.
Invariant: one group at a time works in a folder.
A crash leaves: the lock file, without the lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

_LOCK_WAIT_S = 30.0
"""The previous incarnation's rank 0 may need a moment to die."""


class FolderTaken(RuntimeError):
    """Another trainer works in the folder."""


def lock_folder(folder: Path) -> IO[str]:
    """Hold `folder` until the returned file is closed or the process ends. Raises FolderTaken after 30 s."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("a+")
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                raise FolderTaken(
                    f"{folder}: locked by process {file.read().strip() or 'unknown'} for {_LOCK_WAIT_S:.0f} s; stop "
                    "that trainer, or give this one a folder of its own"
                ) from None
            time.sleep(0.1)
        else:
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            return file
