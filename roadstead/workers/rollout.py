"""The rollout worker: rollout_group, and beside it the fleet of engines with their weight watchers."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import Worker

from roadstead.activities.dead_letter import RecordDeadLetter
from roadstead.activities.rollout import RolloutGroup
from roadstead.config import RunConfig
from roadstead.environments.prompts import load_prompts
from roadstead.environments.rewards import load_environment
from roadstead.environments.text import TextCodec
from roadstead.inference.fleet import Fleet, Replica
from roadstead.inference.vllm_client import VllmEngine
from roadstead.inference.watcher import Choose, WeightWatcher, newest
from roadstead.metrics.registry import Metrics
from roadstead.storage import runs, weights
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.open import open_run
from roadstead.workers.evaluation import evaluation_workers, first_engine_hold
from roadstead.workers.fleet_metrics import ReloadTimes, watches
from roadstead.workers.host import GRACE, main
from roadstead.workers.local import EnginePlace, engines
from roadstead.workflows.options import queue

_GROUPS = 256
"""Groups in flight in this process; the ledger's window is the bound that matters."""


async def make(
    config: RunConfig, client: Client, folder: Path, metrics: Metrics
) -> tuple[Sequence[Worker], Sequence[Awaitable[None]]]:
    store, keys = open_run(config)
    prompts = load_prompts(Path(config.data.prompts))
    expected = runs.read(store, keys).dataset_digest
    if prompts.digest != expected:
        raise ValueError(
            f"data.prompts: {config.data.prompts} has digest {prompts.digest}, the run was begun with {expected}; "
            "give this machine the same file"
        )
    first = weights.manifest_of(store, keys, 0)
    model = weights.download(store, first, folder / "tokenizer")
    places = engines(config, folder)
    fleet = fleet_of(config, places, store, keys, metrics)
    codec = TextCodec(model, chat=config.data.chat_template)
    rollout = RolloutGroup(
        config=config,
        store=store,
        keys=keys,
        fleet=fleet,
        prompts=prompts,
        environment=load_environment(config.data.environment),
        codec=codec,
    )
    worker = Worker(
        client,
        task_queue=queue(config.name, "rollout"),
        activities=[
            rollout.rollout_group,
            RecordDeadLetter(store, keys, prompts, config.seed).record_dead_letter,
        ],
        max_concurrent_activities=_GROUPS,
        graceful_shutdown_timeout=GRACE,
    )
    beside = evaluation_workers(config, client, store, keys, fleet, codec)
    return [worker, *beside], [fleet.run(), *watches(config, fleet, places, folder, metrics)]


def fleet_of(
    config: RunConfig, places: Sequence[EnginePlace], store: ObjectStore, keys: RunKeys, metrics: Metrics
) -> Fleet:
    hold = first_engine_hold(config, store, keys)
    return Fleet(
        [
            _replica(place, config, store, keys, hold.choose if hold and number == 0 else newest, metrics)
            for number, place in enumerate(places)
        ]
    )


def _replica(
    place: EnginePlace, config: RunConfig, store: ObjectStore, keys: RunKeys, choose: Choose, metrics: Metrics
) -> Replica:
    e, r = config.engine, config.rollout
    engine = VllmEngine(
        place.url,
        place.engine_id,
        e.update_timeout_s,
        generate_timeout_s=r.group_timeout_s,
        partial_rollout=r.partial_rollout,
        on_update=r.on_update,
        kv_cache=e.kv_cache,
    )
    watcher = WeightWatcher(
        engine,
        store,
        keys,
        place.folder,
        e.poll_seconds,
        e.update_timeout_s,
        choose=choose,
        on_stage=ReloadTimes(metrics, place.engine_id),
    )
    return Replica(place.engine_id, engine, watcher)


if __name__ == "__main__":
    main("rollout", make)
