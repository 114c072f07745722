"""The trainer of one rank: model, DeepSpeed engine, reference policy, one batch a version.

Owns: the engine, the policy version it holds, the reference policy, saving and loading of its state.
Never touches: the store, the socket, the order of steps (rank 0's service decides).
Invariant: `version` counts the batches trained or attempted. An optimizer step whose gradient is not finite is skipped
by DeepSpeed as a whole: weights and moments stay, the version moves on, `applied` says so. The reference policy is
version 0, whatever version is held. Everything here is collective: all ranks call the same methods in the same order
with the same arguments.
A crash leaves: nothing durable; the state is rebuilt from a checkpoint and the batch log.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open

from roadstead.config import RunConfig, TrainingSection
from roadstead.storage.checkpoints import CheckpointManifest
from roadstead.storage.train_rows import TrainMetrics
from roadstead.training.batch_rows import TrainingBatch
from roadstead.training.deepspeed_config import deepspeed_config
from roadstead.training.export import export
from roadstead.training.metrics import step_metrics, train_row
from roadstead.training.optimization import Optimization

log = logging.getLogger(__name__)

_TAG = "state"
"""DeepSpeed's tag. Every save gets a fresh folder: reusing a tag can load a silent mix of two steps."""


class ModelUnsupported(RuntimeError):
    """The model can't be exported under the names of its own checkpoint."""


class CheckpointUnusable(RuntimeError):
    """The checkpoint was saved under settings that DeepSpeed can't load into this engine."""


@dataclass(frozen=True)
class Effects:
    """What a batch gave, on rank 0."""

    metrics: TrainMetrics
    rows: list[dict[str, Any]]
    """Train rows, in the batch's order."""


@dataclass(frozen=True)
class StepOutcome(Effects):
    """What a step gave, on rank 0."""

    digest: str
    """Weights digest after the step."""


class Trainer:
    """One rank of the group. `torch.distributed` is set up and the accelerator chosen before it is made."""

    def __init__(self, config: RunConfig, model_folder: Path, control: Any) -> None:
        """model_folder: version 0, which stays there. control: a gloo group of all ranks, for Python objects.

        Raises ModelUnsupported. Collective.
        """
        self._config, self._model_folder = config, model_folder
        self._control = control
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self.version = 0
        """Policy version held. Ours: DeepSpeed's global_steps is no count of weights that moved either."""
        self._probed = False
        self._reference: Any = None
        torch.manual_seed(config.seed + self._rank)
        np.random.seed(config.seed + self._rank)
        random.seed(config.seed + self._rank)
        model = _load_model(config, model_folder)
        # deepspeed.initialize builds this op with a compiler (76 s); only inference uses it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=deepspeed_config(config)
        )
        self._engine.train()

    @property
    def device(self) -> Any:
        return self._engine.device

    @property
    def vocabulary(self) -> int:
        """Token ids that the model has."""
        return int(self._engine.module.get_input_embeddings().num_embeddings)

    @property
    def settings(self) -> dict[str, Any]:
        """Whatever changes bits, besides the number of ranks."""
        return {
            "zero_stage": self._config.training.zero_stage,
            "dtype": self._config.model.dtype,
            "device": self._config.engine.device,
            "micro_batch_tokens": self._config.training.micro_batch_tokens,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "transformers": transformers.__version__,
        }

    def use(self, training: TrainingSection) -> None:
        """Train with these settings from here on. Ranks and ZeRO stage stay what the engine was built with.

        Learning rate, betas, weight decay and the clipping norm live in DeepSpeed's optimizer, where loading a
        checkpoint replaces those of the configuration by the saved ones.
        """
        self._config = self._config.model_copy(update={"training": training})
        optimizer = self._engine.optimizer
        optimizer.clip_grad = training.max_grad_norm
        for group in optimizer.param_groups:
            group |= {"lr": training.learning_rate, "betas": training.betas, "weight_decay": training.weight_decay}

    def train(
        self, step: int, batch: TrainingBatch, folder: Path | None, *, always_step: bool = False
    ) -> StepOutcome | None:
        """Train version `step` on its batch; the outcome on rank 0, None elsewhere. Collective.

        folder: where rank 0 exports the new weights; None, in a replay, computes their digest only.
        always_step: step the optimizer also when no row has a gradient, as releases did whose results do not say how
        many rows have one.
        """
        if step != self.version:
            raise RuntimeError(f"asked to train step {step} while holding version {self.version}")
        if self._probed:
            raise RuntimeError(f"asked to train step {step} after a probe, which spoils Adam's moments; load first")
        effects = self._optimize(batch, always_step)
        self.version += 1
        digest = export(self._engine.module, self._rank, folder)
        if effects is None:
            return None
        assert digest is not None
        return StepOutcome(metrics=effects.metrics, rows=effects.rows, digest=digest)

    def probe(self, batch: TrainingBatch) -> Effects | None:
        """What training on `batch` would give, without moving the weights; on rank 0, None elsewhere. Collective.

        It is the step itself at learning rate 0, so that loss, gradient and norm are the step's own, bit for bit,
        on every ZeRO stage. AdamW then subtracts 0 times a finite number from each weight: gradients that are not
        finite are skipped as a whole, and weight decay is scaled by the rate. The moments do move; they have no
        part in a gradient, but nothing may be trained on them: `train` refuses until `load`.

        Not with several mini-batches: the gradient of the second is that of weights which the first one moved.
        """
        if self._config.training.minibatches > 1:
            raise RuntimeError(f"asked to probe a step of {self._config.training.minibatches} mini-batches; train it")
        self._probed = True
        groups = self._engine.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        effects = self._optimize(batch, always_step=False)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return effects

    def _optimize(self, batch: TrainingBatch, always_step: bool) -> Effects | None:
        """Forward, backward and optimizer steps."""
        training = self._config.training
        batch = batch.without_older_than(training.mask_older_than)
        optimization = Optimization(
            self._engine,
            self._held_reference(),
            training,
            rank=self._rank,
            ranks=self._ranks,
            always_step=always_step,
        )
        steps = optimization.run(batch)
        parts: list[Any] = [None] * self._ranks
        # Not after an export: the control group's short timeout has no room for the files of a large model.
        dist.gather_object(optimization.tokens, parts if self._rank == 0 else None, dst=0, group=self._control)
        if self._rank != 0:
            return None
        done = {index: tokens for part in parts for index, tokens in part.items()}
        tokens = [done[i] for i in range(len(batch.rows))]
        divisors = {i: step.divisor * len(steps) for step in steps for i in step.rows}
        metrics = step_metrics(batch.rows, tokens, steps, training, float(self._engine.get_lr()[0]))
        if not metrics.applied and metrics.grad_norm is not None:
            log.warning(
                "version %d: nothing to learn from in %d rows, the weights stay: %d loss tokens, %d masked for their "
                "age, advantage 0 in %.0f%% of the rows (as in every group whose rewards are equal)",
                self.version,
                len(batch.rows),
                metrics.loss_tokens,
                metrics.masked_over_age,
                100 * (metrics.zero_advantage_share or 0.0),
            )
        return Effects(
            metrics=metrics,
            rows=[
                train_row(row, t, training.importance_cap, divisors[i])
                for i, (row, t) in enumerate(zip(batch.rows, tokens, strict=True))
            ],
        )

    def _held_reference(self) -> Any:
        """The reference policy while the loss has a KL term, else None.

        A whole copy on every rank, also on ZeRO-3, in the model's own type: the engine's partitioning is for what is
        trained, and a second engine would share its collectives.
        """
        if self._config.training.kl_coefficient == 0:
            self._reference = None
        elif self._reference is None:
            reference = _load_model(self._config, self._model_folder)
            self._reference = reference.requires_grad_(False).eval().to(self.device)
        return self._reference

    def save(self, folder: Path) -> None:
        """Write DeepSpeed's files and each rank's RNG state into `folder`, which is empty. Collective."""
        self._engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)
        # DeepSpeed keeps rank 0's client state only, and no RNG at all.
        torch.save(_rng_state(), folder / _TAG / f"rng_rank{self._rank}.pt")
        dist.barrier()

    def load(self, folder: Path, manifest: CheckpointManifest) -> None:
        """Take over a verified checkpoint, also into an engine that has trained on. Collective.

        Raises CheckpointUnusable, also when other weights come out of it than went in: DeepSpeed loads flipped
        bits silently.
        """
        mine = {**self.settings, "ranks": self._ranks}
        theirs = {**manifest.settings, "ranks": manifest.world_size}
        for setting in ("ranks", "zero_stage", "dtype"):
            if theirs.get(setting) != mine[setting]:
                raise CheckpointUnusable(
                    f"checkpoint v={manifest.version} was saved with {setting} {theirs.get(setting)}, this run has "
                    f"{mine[setting]}; set it back"
                )
        if changed := changed_settings(manifest, self.settings):
            log.warning("checkpoint v=%d was saved under other settings (then, now): %s", manifest.version, changed)
        path, _ = self._engine.load_checkpoint(str(folder), tag=_TAG)
        if path is None:  # DeepSpeed warns and would train from scratch
            raise CheckpointUnusable(f"DeepSpeed found nothing to load in checkpoint v={manifest.version}")
        _set_rng_state(torch.load(folder / _TAG / f"rng_rank{self._rank}.pt", weights_only=False))
        self.version = manifest.version
        self._probed = False
        digest = self.digest()
        if digest is not None and digest != manifest.weights_digest:
            raise CheckpointUnusable(
                f"checkpoint v={manifest.version} loads as weights {digest}, it was saved as {manifest.weights_digest}"
            )

    def digest(self, folder: Path | None = None) -> str | None:
        """Digest of the weights held, on rank 0, which exports them to `folder` if there is one. Collective."""
        return export(self._engine.module, self._rank, folder)


def changed_settings(manifest: CheckpointManifest, now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that a checkpoint was saved under and that differ: (then, now) by name."""
    return {name: (manifest.settings.get(name), now[name]) for name in now if manifest.settings.get(name) != now[name]}


def _load_model(config: RunConfig, folder: Path) -> Any:
    transformers.utils.logging.disable_progress_bar()
    settings = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    for name, value in settings.to_dict().items():
        # The policy that is trained must be the policy that was sampled, and a replay must repeat it.
        if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(settings, name, 0.0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=settings, dtype=getattr(torch, config.model.dtype), local_files_only=True
    )
    unknown = {name for name, _ in model.named_parameters()} - _tensor_names(folder)
    if unknown:
        raise ModelUnsupported(
            f"model.path: {type(model).__name__} holds {len(unknown)} parameter(s) under names that its own "
            f"checkpoint does not have, for example {min(unknown)!r}; the engine could not load the exported weights. "
            "Use a model whose parameters transformers does not rename or fuse"
        )
    return model


def _tensor_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    return names


def _rng_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
