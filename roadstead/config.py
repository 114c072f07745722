"""The one configuration of a run.

Owns: every key that a run's YAML may hold, its default, and the refusals.
Never touches: files other than the YAML given, the network, the environment.
Invariant: a `RunConfig` that exists is runnable; an impossible combination cannot be built. An error names the
key, the value and the remedy.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

RUN_ID = re.compile(r"^[a-z0-9][a-z0-9-]{0,62}$")
"""Run ids are S3 key prefixes, Temporal workflow ids, queue prefixes and folder names at once."""


class ConfigError(ValueError):
    """The configuration can't be run; the text says which key, which value and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    path: str
    """A Hugging Face causal LM directory: config.json, *.safetensors, tokenizer files."""
    dtype: Literal["float32", "bfloat16"] = "float32"


class RewardSection(Section):
    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """Import path `module:function`, called with the prompt's row and the transcript; may be async."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """0 records the component without adding it."""
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Past it the trajectory is recorded without a reward and not trained on."""

    @property
    def name(self) -> str:
        """Of the component: the function's own name."""
        return self.function.rpartition(":")[2]


class DataSection(Section):
    prompts: str
    """JSONL or Parquet, one prompt a row; needs a `prompt` column, may have `prompt_id`."""
    environment: str = "roadstead.environments.arithmetic:ArithmeticEnvironment"
    """Import path `module:attribute` of an environment, or of a reward function for single-turn tasks."""
    rewards: tuple[RewardSection, ...] = ()
    """Components whose weighted sum is added to the environment's own reward."""
    chat_template: bool = False
    """Render prompts, and what the environment says, by the model's chat template."""
    train_on_external: bool = False
    """Allow prompt rows that bring finished trajectories with them (column `trajectories`): they are not generated,
    are marked in the data, and count in no age statistics."""

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        names = [reward.name for reward in self.rewards]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"rewards: two functions are called {name!r}; components are told apart by name")
        return self


class StalenessSection(Section):
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """S: a group admitted under version v is trained in a step b with b <= v + S. 0 is synchronous RL."""
    groups_per_batch: Annotated[int, Field(ge=1)] = 8
    """B: groups, hence prompts, a training step."""
    slots_per_buffer: Annotated[int, Field(ge=1)] | None = None
    """More slots than groups_per_batch over-samples whole groups; None means exactly groups_per_batch."""
    max_groups_in_flight: Annotated[int, Field(ge=1)] | None = None
    """Concurrency of generation, in groups; None means as many as the bound allows."""


class RolloutSection(Section):
    group_size: Annotated[int, Field(ge=1)] = 8
    """n: trajectories a prompt, at least 2."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Of a whole response: all turns of the model, and what the environment says between them."""
    max_turns: Annotated[int, Field(ge=1)] = 16
    """Turns of the model in one trajectory."""
    environment_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Deadline of one call of the environment: reset, step or reward."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    top_p: float = 1.0
    """Only 1: a truncated distribution biases every importance ratio by the log of the mass that was kept."""
    ignore_eos: bool = False
    """Generate to max_tokens whatever the model says; for load tests."""
    extra_members: Annotated[int, Field(ge=0)] = 0
    """Over-sampling within a group: so many members more are started, the first group_size to finish are the group and
    the rest is aborted in the engine. Favours short responses."""
    group_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Wall time for one attempt to generate a group; then `on_timeout`."""
    stuck_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """How long an idle trainer waits for a batch whose every slot is taken before its unfinished groups are discarded:
    finished ones of later batches move up, other prompts take the slots. None: as long as it takes."""
    on_timeout: Literal["retry", "discard", "truncate"] = "retry"
    """Of a group at its group_timeout_s: generate it again (max_attempts times), give its slot to another prompt, or
    end its trajectories where they are."""
    max_attempts: Annotated[int, Field(ge=1)] = 5
    """Attempts a group before it is dead-lettered and its slot freed."""
    max_dead_letters: Annotated[int, Field(ge=0)] | None = None
    """Of the whole run; one more fails it. None: only two batches' worth in a row do."""
    partial_rollout: bool = True
    """Requests in flight go on under new weights. False: see `on_update`."""
    on_update: Literal["wait", "abort"] = "wait"
    """Without partial_rollout, new weights wait for the turns in flight, or those are aborted and generated again."""


class FilterSection(Section):
    """Groups that are generated, recorded and not trained on; another prompt takes the slot."""

    zero_variance: bool = False
    """Groups whose rewards are all equal: they have no gradient (dynamic sampling, as in DAPO)."""
    min_tokens: Annotated[int, Field(ge=1)] | None = None
    """Groups with a response shorter than this."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Groups with a response longer than this."""
    functions: tuple[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")], ...] = ()
    """Import paths `module:function` of (list of the group's rows) -> reason to filter it, or None."""
    empty_batches: Annotated[int, Field(ge=1)] = 3
    """Stop the run when so many batches' worth of groups in a row hold nothing to learn from."""


class EvaluationSection(Section):
    """Samples of fixed prompts from a fixed version, beside training and never part of it."""

    prompts: str
    """JSONL or Parquet, as data.prompts."""
    every: Annotated[int, Field(ge=1)] = 10
    """Versions between evaluations; version 0 and the last one are always evaluated."""
    group_size: Annotated[int, Field(ge=1)] = 1
    """Samples a prompt."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """None: rollout.max_tokens."""
    environment: str | None = None
    """None: data.environment."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Of a whole evaluation; an engine holds its version no longer than that."""


class TrainingSection(Section):
    steps: Annotated[int, Field(ge=1)]
    """Step target: optimizer steps of the whole run."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    importance_cap: Annotated[float, Field(gt=0)] = 2.0
    """Truncation of the importance weight exp(proximal - behaviour logprob); proximal: the weights at the start of the
    step, recomputed by the trainer (the decoupled objective)."""
    importance_level: Literal["token", "sequence"] = "token"
    """sequence: one weight a trajectory, exp of the mean over its loss tokens."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps a batch. With 1 the ratio to the proximal policy is 1 and its clip never acts."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio to the proximal policy is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """More than clip_low is clip-higher, as in DAPO (0.28 there)."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence to the reference policy, version 0, in the loss. 0: no reference is held."""
    mask_older_than: Annotated[int, Field(ge=0)] | None = None
    """Tokens of more versions of age carry no loss: the third way to hold a bound, beside refusing and waiting."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """sequence_mean: the mean over trajectories of each one's token mean."""
    normalize_advantages: bool = True
    """Divide group-relative advantages by the group's standard deviation, as in GRPO."""
    zero_stage: Literal[1, 2, 3] = 1
    """No stage 0: in DeepSpeed 0.19.8 it applies non-finite gradients to the weights and reports no norm."""
    ranks: Annotated[int, Field(ge=1)] = 1
    """Processes of the DeepSpeed group on this machine."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Token budget, padding included, of one forward pass on one rank."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 10
    """Steps between checkpoints; what lies between is replayed from the batch log."""


class EngineSection(Section):
    device: Literal["cpu", "cuda"] = "cpu"
    max_model_len: Annotated[int, Field(ge=8)] = 512
    max_num_seqs: Annotated[int, Field(ge=1)] = 64
    kv_cache_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """CPU build only; on CUDA `gpu_memory_utilization` decides."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Of the first replica; 0 picks a free one."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """vLLM servers on this machine. On CUDA each takes the next GPU."""
    urls: tuple[str, ...] = ()
    """vLLM servers of your own, started with `python -m roadstead.inference.launcher`; none is started here then. They
    must see this machine's folder of weights under the same path."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """Of requests in flight when new weights come: computed anew, or kept and recorded by token."""
    poll_seconds: Annotated[float, Field(gt=0)] = 0.2
    """How often the weight watcher looks for a newer version."""
    update_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Deadline of each stage of a weight update; a stall names its stage."""


class StorageSection(Section):
    bucket: Annotated[str, Field(min_length=3, max_length=63)] = "roadstead"
    prefix: str = "runs"
    endpoint_url: str | None = None
    """None uses the local stack's S3; credentials then come from it, else from the usual AWS chain."""
    region: str = "us-east-1"


class TemporalSection(Section):
    address: str | None = None
    """host:port of your own Temporal; None uses the local stack's."""
    namespace: str = "default"


class MetricsSection(Section):
    enabled: bool = True
    """Every process serves its metrics in Prometheus form on 127.0.0.1, on a port of its own."""


class TrackerSection(Section):
    kind: Literal["wandb", "mlflow", "tensorboard"]
    project: str = "roadstead"
    """Project of W&B, experiment of MLflow; unused by TensorBoard."""
    folder: str | None = None
    """Where TensorBoard and offline W&B write; None: under the run's local folder."""
    url: str | None = None
    """Of your MLflow or W&B server; None: the library's own default. API keys come from the library's own variables."""
    offline: bool = False
    """W&B: write to the folder only, for `wandb sync`."""


class RunConfig(Section):
    """One run, whole. `load` reads it from YAML; `dump` gives the YAML back."""

    name: str
    """Run id: workflow id, S3 prefix and task queue prefix."""
    seed: int = 0
    model: ModelSection
    data: DataSection
    staleness: StalenessSection = StalenessSection()
    rollout: RolloutSection = RolloutSection()
    filters: FilterSection = FilterSection()
    evaluation: EvaluationSection | None = None
    training: TrainingSection
    engine: EngineSection = EngineSection()
    storage: StorageSection = StorageSection()
    temporal: TemporalSection = TemporalSection()
    metrics: MetricsSection = MetricsSection()
    trackers: tuple[TrackerSection, ...] = ()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        s, r, t, e = self.staleness, self.rollout, self.training, self.engine
        if not RUN_ID.match(self.name):
            raise ValueError(
                f"name: {self.name!r} is not a run id; use 1 to 63 of a-z, 0-9 and '-', not beginning with '-'"
            )
        if r.group_size == 1:
            raise ValueError(
                "rollout.group_size: 1 leaves a trajectory nothing to be compared with, every advantage would be 0; "
                "set rollout.group_size >= 2"
            )
        if s.slots_per_buffer is not None and s.slots_per_buffer < s.groups_per_batch:
            raise ValueError(
                f"staleness.slots_per_buffer: {s.slots_per_buffer} can never fill a batch of "
                f"staleness.groups_per_batch: {s.groups_per_batch}; raise the first or lower the second"
            )
        if r.top_p != 1.0:
            raise ValueError(
                f"rollout.top_p: {r.top_p} cuts the distribution that the trainer computes ratios against, which "
                "biases every one of them; use 1.0 and lower rollout.temperature, which is corrected for"
            )
        f = self.filters
        if f.min_tokens is not None and f.max_tokens is not None and f.min_tokens > f.max_tokens:
            raise ValueError(
                f"filters.min_tokens: {f.min_tokens} is above filters.max_tokens: {f.max_tokens}; nothing would pass"
            )
        if t.mask_older_than is not None and t.mask_older_than >= s.max_staleness:
            raise ValueError(
                f"training.mask_older_than: {t.mask_older_than} masks nothing, staleness.max_staleness: "
                f"{s.max_staleness} lets nothing older in; lower the first or leave it out"
            )
        if t.minibatches > s.groups_per_batch:
            raise ValueError(
                f"training.minibatches: {t.minibatches} is more than staleness.groups_per_batch: {s.groups_per_batch}; "
                "a mini-batch needs a group"
            )
        if self.evaluation is not None and (self.evaluation.max_tokens or 0) >= e.max_model_len:
            raise ValueError(
                f"evaluation.max_tokens: {self.evaluation.max_tokens} leaves no room for a prompt in "
                f"engine.max_model_len: {e.max_model_len}; lower the first or raise the second"
            )
        if e.urls and e.replicas != 1:
            raise ValueError(
                f"engine.replicas: {e.replicas} are started here and engine.urls are yours; set one of the two"
            )
        if r.max_tokens >= e.max_model_len:
            raise ValueError(
                f"rollout.max_tokens: {r.max_tokens} leaves no room for a prompt in "
                f"engine.max_model_len: {e.max_model_len}; lower the first or raise the second"
            )
        return self

    @property
    def slots_per_buffer(self) -> int:
        return self.staleness.slots_per_buffer or self.staleness.groups_per_batch

    def dump(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def parse(values: Any, source: str) -> RunConfig:
    """Validate `values`; `source` is named in the error. Raises ConfigError."""
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: expected a mapping of keys at the top level, got {type(values).__name__}")
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{source}:\n" + "\n".join(f"  {_explain(e)}" for e in error.errors())) from error


def load(path: Path) -> RunConfig:
    """Read one YAML file. Relative model and prompt paths are taken from the YAML's own folder."""
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}); give the path of a run's YAML") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    config = parse(values, str(path))
    base = path.resolve().parent
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": str(base / config.model.path)}),
            "data": config.data.model_copy(update={"prompts": str(base / config.data.prompts)}),
            "evaluation": config.evaluation
            and config.evaluation.model_copy(update={"prompts": str(base / config.evaluation.prompts)}),
            "trackers": tuple(
                tracker.model_copy(update={"folder": str(base / tracker.folder)}) if tracker.folder else tracker
                for tracker in config.trackers
            ),
        }
    )


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        section: Any = RunConfig
        for part in error["loc"][:-1]:
            section = section.model_fields[part].annotation
        return f"{key}: unknown key (value {error['input']!r}); known here: {', '.join(section.model_fields)}"
    if error["type"] == "missing":
        return f"{key}: missing; add it"
    return f"{key}: {message} (value {error['input']!r})" if key else message
