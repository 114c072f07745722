"""A local Prometheus on a data directory: it scrapes every run there and evaluates the alert rules.

Owns: its configuration, `<data>/prometheus/`. Never touches: what serves the metrics.
Invariant: it listens on loopback only, and its configuration can be used in a Prometheus of your own as it is.
A crash leaves: its database, which the next one opens.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from roadstead.infra.health import answers
from roadstead.infra.ports import LOOPBACK
from roadstead.infra.processes import ProcessFailed, ProcessSpec
from roadstead.metrics.server import targets_folder

SCRAPE_INTERVAL = "5s"
_KEEP = "30d"


def binary(name: str) -> str:
    """Path of `prometheus` or `promtool`. Raises ProcessFailed with the remedy."""
    unpacked = Path(sys.prefix) / "prometheus"
    own = unpacked / "usr" / "bin" / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        reason = unpacked / "absent"
        why = f" ({reason.read_text().strip()})" if reason.exists() else ""
        raise ProcessFailed(
            f"{name}: not found{why}; on Debian or Ubuntu run scripts/prometheus, which unpacks it without root, "
            "elsewhere put it on the path"
        )
    return found


def target_files(data: Path) -> list[str]:
    """Patterns of the target files of every run in `data`. One a run: Prometheus takes a * in the last part only."""
    runs = sorted(folder for folder in (data / "runs").glob("*") if folder.is_dir())
    return [str(targets_folder(folder) / "*.json") for folder in runs]


def configuration(data: Path, rules: Path) -> str:
    """prometheus.yml: all runs that `data` has now, with the alert rules of file `rules`."""
    files = target_files(data)
    scrape = {
        "job_name": "roadstead",  # target files bring a job of their own: roadstead, temporal, vllm
        "scrape_interval": SCRAPE_INTERVAL,
        "file_sd_configs": [{"files": files, "refresh_interval": SCRAPE_INTERVAL}],
    }
    # No run, no job: a file_sd_configs without files is refused.
    whole: dict[str, Any] = {"rule_files": [str(rules)], "scrape_configs": [scrape] if files else []}
    return yaml.safe_dump(whole, sort_keys=False)


def prometheus_spec(folder: Path, config: Path, port: int, log: Path) -> ProcessSpec:
    """folder: its database. It reads `config` again on SIGHUP."""
    address = f"{LOOPBACK}:{port}"

    async def ready() -> bool:
        return await answers(f"http://{address}/-/ready")

    assets = Path(sys.prefix) / "prometheus" / "usr" / "share" / "prometheus" / "web"
    return ProcessSpec(
        name="prometheus",
        what=f"Prometheus at http://{address}",
        argv=(
            binary("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}",
            f"--storage.tsdb.retention.time={_KEEP}",
            f"--web.listen-address={address}",
            # Debian's build looks for its pages where its package would have installed them.
            *((f"--web.local-assets={assets}",) if assets.exists() else ()),
        ),
        log=log,
        ready=ready,
        ready_timeout_s=30,
        alive=ready,
    )
