"""The evaluation's part of the workers: its activities, the worker of its queue, the first engine's hold.

Owns: what of them there is in a run that evaluates; in one that does not, nothing. Never touches: what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from temporalio.client import Client
from temporalio.worker import Worker

from roadstead.activities.close_evaluation import CloseEvaluation
from roadstead.activities.evaluate import Engines, Evaluate
from roadstead.activities.members import Players
from roadstead.config import EvaluationSection, RunConfig
from roadstead.environments.prompts import PromptSet, load_prompts
from roadstead.environments.rewards import load_environment, load_rewards
from roadstead.environments.text import TextCodec
from roadstead.inference.evaluation_hold import EvaluationHold
from roadstead.storage import evals
from roadstead.storage.evals import EvaluationSettings
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore
from roadstead.workers.host import GRACE
from roadstead.workflows.options import queue

_ORDERS = 256
"""As many as an evaluation has (workflows/evaluation.py)."""


def closing_activities(config: RunConfig, store: ObjectStore, keys: RunKeys) -> list[Callable[..., Any]]:
    """Of the orchestrator worker."""
    if config.evaluation is None:
        return []
    _, settings = _prompts(config, config.evaluation)
    return [CloseEvaluation(store, keys, settings).close_evaluation]


def evaluation_workers(
    config: RunConfig, client: Client, store: ObjectStore, keys: RunKeys, engines: Engines, codec: TextCodec
) -> list[Worker]:
    """Of the rollout worker's process: a queue, and slots, of its own."""
    section = config.evaluation
    if section is None:
        return []
    prompts, settings = _prompts(config, section)
    limits = {"temperature": settings.temperature, "max_tokens": settings.max_tokens}
    players = Players(
        load_environment(settings.environment),
        codec,
        load_rewards(config.data.rewards),
        config.rollout.model_copy(update=limits),
    )
    evaluate = Evaluate(store, keys, engines, prompts, players, settings)
    worker = Worker(
        client,
        task_queue=queue(config.name, "evaluation"),
        activities=[evaluate.open_evaluation, evaluate.evaluate_group],
        max_concurrent_activities=_ORDERS,
        graceful_shutdown_timeout=GRACE,
    )
    return [worker]


def first_engine_hold(config: RunConfig, store: ObjectStore, keys: RunKeys) -> EvaluationHold | None:
    """What chooses the first engine's versions; None: it follows the newest, as the others do."""
    section = config.evaluation
    if section is None:
        return None
    return EvaluationHold(
        on_record=lambda version: evals.is_closed(store, keys, version),
        every=section.every,
        target=config.training.steps,
        timeout_s=section.timeout_s,
    )


def _prompts(config: RunConfig, section: EvaluationSection) -> tuple[PromptSet, EvaluationSettings]:
    prompts = load_prompts(Path(section.prompts))
    return prompts, evals.settings_of(config, section, prompts.digest, len(prompts))
