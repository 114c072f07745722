"""One rank of the trainer: `python -m roadstead.training.rank --config RUN.yaml --socket PATH --folder DIR`.

Owns: the process from boot to exit: waiting for version 0, serving. `boot` builds the group and restores.
Never touches: the answer to a command (the service's), the optimizer (the trainer's).
Invariant: after an error in a collective phase the process exits with 1, and the launcher restarts the group as a
whole; nothing is repaired in place.
A crash leaves: a scratch folder that the next incarnation empties, and on S3 whatever the service's order allows.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
import traceback
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from roadstead.config import RunConfig, TrainingSection, load
from roadstead.process import die_with_parent
from roadstead.storage.batches import BatchCommit
from roadstead.storage.open import open_run
from roadstead.training.folder_lock import lock_folder
from roadstead.training.pulse import beat, silence
from roadstead.training.server import serve
from roadstead.training.service import TrainerState, TrainService, read_batch

log = logging.getLogger("roadstead.training.rank")

_WEIGHTS_WAIT_S = 600.0
"""Version 0 is uploaded when the run begins, which may be minutes after the trainer for a large model."""
_POLL_S = 0.5
_SCRATCH = ("export", "checkpoint", "restore")


class WeightsNotPublished(RuntimeError):
    """Version 0 did not appear in time."""


class Rank:
    """One process. `run` returns when the group is told to quit, and raises when it must be restarted."""

    def __init__(self, config: RunConfig, socket: Path, folder: Path) -> None:
        self._config, self._socket, self._folder = config, socket, folder
        self._rank = int(os.environ["RANK"])
        incarnation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._failure = folder / "failure.txt"
        failure = self._failure.read_text() if self._failure.exists() else None
        self._state = TrainerState(incarnation, failure, lambda began: silence(folder, config.training.ranks, began))
        self._store, self._keys = open_run(config)

    def run(self) -> None:
        service = self._open_service() if self._rank == 0 else None
        beat(self._folder, self._rank)
        # Heavy imports come after the socket answers, so that a boot can be watched.
        self._state.enter("boot: importing torch and DeepSpeed")
        import torch.distributed as dist

        from roadstead.training.boot import build_trainer, join_group

        self._await_weights()
        self._state.enter("boot: waiting for the other ranks")
        group = join_group(self._config)
        # The newest checkpoint of all; the service replays from there.
        trainer, _ = build_trainer(
            self._config,
            self._store,
            self._keys,
            group,
            self._folder,
            self._config.training.steps,
            self._state.enter,
        )
        if service is not None:
            service.ready(
                group,
                version=trainer.version,
                vocabulary=trainer.vocabulary,
                ranks=dist.get_world_size(),
                settings=trainer.settings,
            )
        log.info("rank %d holds version %d", self._rank, trainer.version)

        def execute(operation: dict[str, Any], batch: Any) -> Any:
            folder = None if operation["folder"] is None else Path(operation["folder"])
            if operation["op"] == "save":
                assert folder is not None
                return trainer.save(folder)
            record = BatchCommit.model_validate_json(operation["commit"])
            # Rank 0 brings the batch that it has proved; every other rank reads and proves it itself.
            batch = batch or read_batch(self._store, record, trainer.vocabulary)
            # Also at the first step: a checkpoint brings back the learning rate and clipping norm it was saved with.
            trainer.use(TrainingSection.model_validate_json(operation["training"]))
            return trainer.train(record.step, batch, folder, always_step=operation["always_step"])

        group.serve(execute)
        dist.destroy_process_group()

    def fail_stop(self, error: BaseException) -> NoReturn:
        """Leave the reason for the next incarnation's status and end at once, whatever other threads do."""
        text = "".join(traceback.format_exception(error))
        log.error("rank %d ends: %s", self._rank, text)
        if self._rank == 0:
            when = datetime.now(UTC).isoformat(timespec="seconds")
            self._failure.write_text(f"{when} {type(error).__name__}: {error}")
        sys.stderr.flush()
        os._exit(1)

    def _open_service(self) -> TrainService:
        self._lock = lock_folder(self._folder)
        for name in _SCRATCH:
            shutil.rmtree(self._folder / name, ignore_errors=True)
        service = TrainService(self._config, self._store, self._keys, self._folder, self._state, self.fail_stop)
        serve(self._socket, self._state, service)
        return service

    def _await_weights(self) -> None:
        key = self._keys.weights_manifest(0)
        self._state.enter(f"boot: waiting for weights v=0 ({self._store.url(key)})")
        deadline = time.monotonic() + _WEIGHTS_WAIT_S
        while not self._store.exists(key):
            if time.monotonic() > deadline:
                raise WeightsNotPublished(
                    f"{self._store.url(key)}: not there after {_WEIGHTS_WAIT_S:.0f} s; start the run, which uploads "
                    "the model as version 0"
                )
            time.sleep(_POLL_S)


def configure_logging() -> None:
    """What a rank's log holds. Before the heavy imports."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for noisy in ("botocore", "boto3", "urllib3", "DeepSpeed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # DeepSpeed calls collectives under names that torch renames; said at every step, it hides what matters.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m roadstead.training.rank", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    configure_logging()
    rank = Rank(load(arguments.config), arguments.socket, arguments.folder)
    try:
        rank.run()
    except Exception as error:
        rank.fail_stop(error)


if __name__ == "__main__":
    main()
