"""Ports in a row, remembered a data directory."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from roadstead.cli.session import _with_ports
from roadstead.infra.ports import is_free, remembered_ports, remembered_row
from tests.support import tiny

NAMES = ["engine", "engine-1", "engine-2"]


def test_a_row_is_free_in_order_and_the_same_next_time(tmp_path: Path) -> None:
    file = tmp_path / "ports.json"
    row = remembered_row(file, NAMES)
    first = row["engine"]
    assert row == {"engine": first, "engine-1": first + 1, "engine-2": first + 2}
    assert all(is_free(port) for port in row.values())
    assert remembered_row(file, NAMES) == row


def test_a_row_moves_as_a_whole_when_one_of_its_ports_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "ports.json"
    row = remembered_row(file, NAMES)
    with socket.socket() as other:
        other.bind(("127.0.0.1", row["engine-1"]))
        other.listen()
        moved = remembered_row(file, NAMES)
        assert row["engine-1"] not in moved.values()
        assert remembered_row(file, ["engine"]) == {"engine": moved["engine"]}


def test_a_data_directory_keeps_its_engine_port_and_its_other_ports(tmp_path: Path) -> None:
    """ports.json as it was before there were replicas."""
    file = tmp_path / "ports.json"
    before = remembered_ports(file, ["temporal", "s3", "engine"])
    config = tiny.config(tmp_path, "x")
    assert _with_ports(config, tmp_path).engine.port == before["engine"]
    two = config.model_copy(update={"engine": config.engine.model_copy(update={"replicas": 2})})
    port = _with_ports(two, tmp_path).engine.port
    assert json.loads(file.read_text()) == {**before, "engine": port, "engine-1": port + 1}


def test_ports_of_the_users_own_choice_are_left_alone(tmp_path: Path) -> None:
    for engine in ({"port": 2001, "replicas": 2}, {"urls": ["http://127.0.0.1:8000"]}):
        config = tiny.config(tmp_path, "x", engine={"max_model_len": 128, **engine})
        assert _with_ports(config, tmp_path) == config
    assert not (tmp_path / "ports.json").exists()
