"""Libraries of trackers report to their makers unless told not to."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "DO_NOT_TRACK": "true",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_ALLOW_FILE_STORE": "true",  # the light MLflow has no database of its own
        "GIT_PYTHON_REFRESH": "quiet",
    }.items():
        monkeypatch.setenv(name, value)
