"""The death signal."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def test_dies_with_its_parent() -> None:
    child = (
        "import time\n"
        "from roadstead.process import die_with_parent\n"
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
