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
    """n: trajectories a prompt."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Of a whole response: all turns of the model, and what the environment says between them."""
    max_turns: Annotated[int, Field(ge=1)] = 16
    """Turns of the model in one trajectory."""
    environment_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Deadline of one call of the environment: reset, step or reward."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    ignore_eos: bool = False
    """Generate to max_tokens whatever the model says; for load tests."""
    group_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Wall time for one attempt to generate a group, after which it is generated again."""
    max_attempts: Annotated[int, Field(ge=1)] = 5
    """Attempts a group before it is dead-lettered and its slot freed."""


class TrainingSection(Section):
    steps: Annotated[int, Field(ge=1)]
    """Step target: optimizer steps of the whole run."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    importance_cap: Annotated[float, Field(gt=0)] = 2.0
    """Truncation of the importance weight exp(trainer - behaviour logprob) of a token.

    There is no PPO clip: a batch gets exactly one optimizer step, so the ratio to the step's own start is 1."""
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
    """0 picks a free one."""
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


class RunConfig(Section):
    """One run, whole. `load` reads it from YAML; `dump` gives the YAML back."""

    name: str
    """Run id: workflow id, S3 prefix and task queue prefix."""
    seed: int = 0
    model: ModelSection
    data: DataSection
    staleness: StalenessSection = StalenessSection()
    rollout: RolloutSection = RolloutSection()
    training: TrainingSection
    engine: EngineSection = EngineSection()
    storage: StorageSection = StorageSection()
    temporal: TemporalSection = TemporalSection()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        s, r, t, e = self.staleness, self.rollout, self.training, self.engine
        if not RUN_ID.match(self.name):
            raise ValueError(
                f"name: {self.name!r} is not a run id; use 1 to 63 of a-z, 0-9 and '-', not beginning with '-'"
            )
        if r.group_size == 1 and t.normalize_advantages:
            raise ValueError(
                "rollout.group_size: 1 has no group standard deviation to divide by; "
                "set rollout.group_size >= 2 or training.normalize_advantages: false"
            )
        if s.slots_per_buffer is not None and s.slots_per_buffer < s.groups_per_batch:
            raise ValueError(
                f"staleness.slots_per_buffer: {s.slots_per_buffer} can never fill a batch of "
                f"staleness.groups_per_batch: {s.groups_per_batch}; raise the first or lower the second"
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
