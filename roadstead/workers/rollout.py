"""The rollout worker of one engine: rollout_group, and the engine's weight watcher beside it."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import Worker

from roadstead.activities.rollout import RolloutGroup
from roadstead.config import RunConfig
from roadstead.environments.prompts import load_prompts
from roadstead.environments.rewards import load_environment
from roadstead.environments.text import TextCodec
from roadstead.inference.vllm_client import VllmEngine
from roadstead.inference.watcher import WeightWatcher
from roadstead.storage import runs, weights
from roadstead.storage.open import open_run
from roadstead.workers.host import GRACE, main
from roadstead.workers.local import engine_folder
from roadstead.workflows.options import queue

_GROUPS = 256
"""Groups in flight in this process; the ledger's window is the bound that matters."""


async def make(config: RunConfig, client: Client, folder: Path) -> tuple[Sequence[Worker], Sequence[Awaitable[None]]]:
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
    engine = VllmEngine(
        f"http://127.0.0.1:{config.engine.port}",
        f"vllm-{config.engine.port}",
        config.engine.update_timeout_s,
        generate_timeout_s=config.rollout.group_timeout_s,
    )
    watcher = WeightWatcher(
        engine, store, keys, engine_folder(folder), config.engine.poll_seconds, config.engine.update_timeout_s
    )
    rollout = RolloutGroup(
        config=config,
        store=store,
        keys=keys,
        engine=engine,
        watcher=watcher,
        prompts=prompts,
        environment=load_environment(config.data.environment),
        codec=TextCodec(model, chat=config.data.chat_template),
    )
    worker = Worker(
        client,
        task_queue=queue(config.name, "rollout"),
        activities=[rollout.rollout_group],
        max_concurrent_activities=_GROUPS,
        graceful_shutdown_timeout=GRACE,
    )
    return [worker], [watcher.run()]


if __name__ == "__main__":
    main("rollout", make)
