"""MLflow: one run of an experiment, found again by its tag.

Owns: the MLflow run that carries its tag. Never touches: other runs, the process's active run, the model registry.
Invariant: the tag is set in the request that makes the run, so that no run of ours is without it.
A crash leaves: a run without some parameters, or with a part of a point's metrics: both are completed by the next
opening, which asks for what is there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from roadstead.trackers.tracker import flat

_TAG = "roadstead.run"
_PARAMETERS = 100
"""MLflow's limit of one request."""
_TEXT = 500
"""Of a parameter's value; older servers refuse more."""
_REFUSED = re.compile(r"[^\w\-. /:]")
"""Characters that MLflow takes in no metric's name; a reward component may have any."""


class MlflowTracker:
    def __init__(self, experiment: str, url: str | None) -> None:
        self._experiment, self._url = experiment, url
        self._client: Any = None
        self._run = ""
        self._asked: set[str] = set()
        """Metrics of which a last point, broken off in the middle, was looked for."""

    def open(self, run: str, config: Mapping[str, Any]) -> None:
        from mlflow.tracking import MlflowClient

        self._asked.clear()
        self._client = MlflowClient(tracking_uri=self._url)
        found = self._find(run)
        self._run = found.info.run_id
        self._add_parameters({name: str(value)[:_TEXT] for name, value in flat(config).items()}, found.data.params)

    def logged(self, name: str) -> set[int]:
        return {metric.step for metric in self._client.get_metric_history(self._run, _REFUSED.sub("_", name))}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        values = {_REFUSED.sub("_", name): value for name, value in values.items()}
        # A request's metrics need not arrive together. Only the point at which somebody broke off can be in parts.
        missing = [name for name in values if name in self._asked or step not in self.logged(name)]
        self._client.log_batch(
            self._run, metrics=[Metric(name, values[name], now, step) for name in missing], synchronous=True
        )
        self._asked.update(values)

    def close(self) -> None:
        """Nothing is buffered. The run stays open: no follower knows whether the training goes on."""
        self._client = None

    def _find(self, run: str) -> Any:
        experiment = self._client.get_experiment_by_name(self._experiment)
        where = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        ours = self._client.search_runs([where], f"tags.`{_TAG}` = '{run}'", order_by=["attributes.start_time"])
        # The oldest, should two followers have made one at the same time.
        return ours[0] if ours else self._client.create_run(where, tags={_TAG: run}, run_name=run)

    def _add_parameters(self, wanted: Mapping[str, str], there: Mapping[str, str]) -> None:
        """Those of the first opening stay: MLflow's parameters can't change, a resumed run's configuration can."""
        from mlflow.entities import Param

        missing = [Param(name, value) for name, value in wanted.items() if name not in there]
        for i in range(0, len(missing), _PARAMETERS):
            self._client.log_batch(self._run, params=missing[i : i + _PARAMETERS], synchronous=True)
