"""The folder's lock and the death signal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roadstead.training import process


def test_a_folder_has_one_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_LOCK_WAIT_S", 0.2)
    held = process.lock_folder(tmp_path / "scratch")
    with pytest.raises(process.FolderTaken, match=f"locked by process {os.getpid()}"):
        process.lock_folder(tmp_path / "scratch")
    held.close()
    process.lock_folder(tmp_path / "scratch").close()


def test_dies_with_its_parent() -> None:
    child = (
        "import time\n"
        "from roadstead.training.process import die_with_parent\n"
        "die_with_parent(); print('up', flush=True); time.sleep(60)\n"
    )
    parent = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True)\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, timeout=30)
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 5
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)
