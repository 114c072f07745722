"""One rank of a replay: `python -m roadstead.training.replay_rank --config RUN.yaml --ask ASK.json --folder DIR`.

Owns: the process from boot to answer, what an operation of the group does, the file of events.
Never touches: which operations are called for (`replay_answers`, on rank 0); it writes nothing to the store.
Invariant: a question gets one answer or one failure, after which the group ends. An error in a collective ends the
process at once, without either: it is told from the log.
A crash leaves: a scratch folder, which whoever started the group removes.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from roadstead.config import RunConfig, TrainingSection, load
from roadstead.process import die_with_parent
from roadstead.storage.batches import BatchCommit, Frozen
from roadstead.storage.checkpoints import CheckpointManifest
from roadstead.storage.open import open_run
from roadstead.training.rank import configure_logging
from roadstead.training.replay import ASK, BisectAsk, Failure, Phase, ReplayAsk, events_file

if TYPE_CHECKING:
    from roadstead.training.group import Execute
    from roadstead.training.replay_answers import Answers, BatchReader
    from roadstead.training.trainer import Trainer

log = logging.getLogger("roadstead.training.replay_rank")


class Events:
    """Rank 0's events, a JSON line each."""

    def __init__(self, folder: Path) -> None:
        self._file = events_file(folder).open("a")

    def tell(self, event: Frozen) -> None:
        self._file.write(event.model_dump_json() + "\n")
        self._file.flush()

    def phase(self, text: str) -> None:
        self.tell(Phase(text=text))


def executor(trainer: Trainer, reader: BatchReader) -> Execute:
    """What every rank does for an operation of the group."""

    def execute(operation: dict[str, Any], _: Any) -> Any:
        folder = None if "folder" not in operation else Path(operation["folder"])
        match operation["op"]:
            case "save":
                assert folder is not None
                return trainer.save(folder)
            case "load":
                assert folder is not None
                return trainer.load(folder, CheckpointManifest.model_validate_json(operation["manifest"]))
            case "digest":
                return trainer.digest(folder)
        record = BatchCommit.model_validate_json(operation["commit"])
        batch = reader.read(record)[1]
        if operation["kept"] is not None:
            batch = batch.subset(operation["kept"])
        trainer.use(TrainingSection.model_validate_json(operation["training"]))
        if operation["op"] == "probe":
            return trainer.probe(batch)
        return trainer.train(record.step, batch, None, always_step=operation["always_step"])

    return execute


def run(config: RunConfig, ask: ReplayAsk | BisectAsk, folder: Path) -> None:
    """One process of the group, from boot to answer."""
    events = Events(folder) if int(os.environ["RANK"]) == 0 else None
    enter = events.phase if events else lambda text: None
    enter("boot: importing torch and DeepSpeed")
    import torch.distributed as dist

    from roadstead.training.boot import build_trainer, join_group
    from roadstead.training.replay_answers import Answers, BatchReader

    store, keys = open_run(config)
    at_most = ask.first if isinstance(ask, ReplayAsk) else ask.step
    group = join_group(config)
    trainer, manifest = build_trainer(config, store, keys, group, folder, at_most, enter)
    reader = BatchReader(store, trainer.vocabulary)
    if events is not None:
        answers = Answers(store, keys, folder, group, trainer, manifest, reader, events.tell)

        def answer() -> None:
            _answer(answers, ask, events)
            group.quit()

        threading.Thread(target=answer, name="answer", daemon=True).start()
    group.serve(executor(trainer, reader))
    dist.destroy_process_group()


def _answer(answers: Answers, ask: ReplayAsk | BisectAsk, events: Events) -> None:
    try:
        events.tell(answers.replay(ask) if isinstance(ask, ReplayAsk) else answers.bisect(ask))
    except Exception as error:  # whatever it is, whoever asked must hear it
        log.exception("no answer")
        events.tell(Failure(type=type(error).__name__, message=str(error)))


def fail_stop(error: BaseException) -> NoReturn:
    """End at once, whatever other threads do; the log is quoted to whoever asked."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m roadstead.training.replay_rank", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--ask", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    configure_logging()
    try:
        run(load(given.config), ASK.validate_json(given.ask.read_bytes()), given.folder)
    except Exception as error:
        fail_stop(error)


if __name__ == "__main__":
    main()
