"""From a run's configuration to its store and keys: the one place where they are put together."""

from __future__ import annotations

from roadstead.config import RunConfig
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore, StoreAddress


def open_run(config: RunConfig) -> tuple[ObjectStore, RunKeys]:
    """Credentials come from the usual AWS chain; the local stack sets them in its children's environment."""
    s = config.storage
    address = StoreAddress(bucket=s.bucket, endpoint_url=s.endpoint_url, region=s.region)
    return ObjectStore(address), RunKeys(s.prefix, config.name)
