"""Where everything of a run lies in the bucket.

Owns: the spelling of every key, so that no other module joins strings. Never touches: the store.
Invariant: a key names one immutable object for ever, but for the hints `latest_weights` and `alive` and for
`index_rows`, which is made anew from the log at will.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunKeys:
    """Keys of one run under `<prefix>/<run_id>/`."""

    prefix: str
    run_id: str

    @property
    def root(self) -> str:
        return f"{self.prefix.strip('/')}/{self.run_id}".lstrip("/")

    @property
    def run(self) -> str:
        return f"{self.root}/run.json"

    def attempt(self, attempt: int) -> str:
        return f"{self.root}/attempts/{attempt:06d}.json"

    def attempt_end(self, attempt: int) -> str:
        return f"{self.root}/attempts/{attempt:06d}-end.json"

    @property
    def alive(self) -> str:
        """Who hosts the run, as a beat."""
        return f"{self.root}/attempts/ALIVE"

    def group(self, group_id: str, attempt: int) -> str:
        return f"{self.root}/groups/{group_id}-a{attempt}.parquet"

    @property
    def dead_letters(self) -> str:
        return f"{self.root}/dead-letters/"

    def dead_letter(self, group_id: str, attempt: int) -> str:
        return f"{self.dead_letters}{group_id}-a{attempt}.json"

    def step_folder(self, step: int) -> str:
        return f"{self.root}/batches/step={step:08d}"

    def batch_data(self, step: int, digest: str) -> str:
        return f"{self.step_folder(step)}/data-{digest[:16]}.parquet"

    def batch_stats(self, step: int, digest: str) -> str:
        return f"{self.step_folder(step)}/stats-{digest[:16]}.parquet"

    def batch_commit(self, step: int) -> str:
        return f"{self.step_folder(step)}/_COMMIT.json"

    def train_rows(self, step: int, digest: str) -> str:
        """What the trainer computed from the batch of that digest."""
        return f"{self.step_folder(step)}/train-{digest[:16]}.parquet"

    def step_record(self, step: int) -> str:
        return f"{self.root}/steps/step={step:08d}.json"

    def weights_folder(self, version: int) -> str:
        return f"{self.root}/weights/v={version:08d}"

    def weights_manifest(self, version: int) -> str:
        return f"{self.weights_folder(version)}/manifest.json"

    @property
    def latest_weights(self) -> str:
        return f"{self.root}/weights/LATEST"

    def checkpoint_folder(self, version: int) -> str:
        return f"{self.root}/checkpoints/v={version:08d}"

    def checkpoint_manifest(self, version: int) -> str:
        return f"{self.checkpoint_folder(version)}/_COMPLETE.json"

    @property
    def checkpoints(self) -> str:
        return f"{self.root}/checkpoints/"

    @property
    def steps(self) -> str:
        return f"{self.root}/steps/"

    @property
    def evals(self) -> str:
        return f"{self.root}/evals/"

    def eval_folder(self, version: int) -> str:
        return f"{self.evals}v={version:08d}"

    def eval_group(self, version: int, settings: str, position: int) -> str:
        """Samples of one prompt, made under the settings of that digest."""
        return f"{self.eval_folder(version)}/groups/{settings[:16]}/p{position:08d}.parquet"

    def eval_data(self, version: int, digest: str) -> str:
        return f"{self.eval_folder(version)}/data-{digest[:16]}.parquet"

    def eval_summary(self, version: int) -> str:
        return f"{self.eval_folder(version)}/summary.json"

    @property
    def index_rows(self) -> str:
        """Scalars of all committed batches."""
        return f"{self.root}/index/rows.parquet"
