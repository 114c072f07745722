"""Pushing to Grafana: everything arrives by its API's contract, once, and a refusal is told with its reason."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from roadstead.dashboards.grafana import DATASOURCE_UID, FOLDER_UID
from roadstead.dashboards.grafana.boards import BOARDS
from roadstead.dashboards.grafana.marks import Mark
from roadstead.dashboards.grafana.push import Credential, Grafana, GrafanaRefused, push
from roadstead.dashboards.grafana.rules import GROUP, for_grafana
from tests.support.fake_grafana import PASSWORD, TOKEN, USER, VIEWER, FakeGrafana, Refusal, grafana

MARKS = [
    Mark("some-run", "resume", "attempt-1", "attempt 1 begins", 1_700_000_000_000),
    Mark("some-run", "bad-step", "digests-3", "step 3 is broken", 1_700_000_300_000, 1_700_000_400_000),
]


@pytest.fixture
def server() -> Iterator[FakeGrafana]:
    with grafana() as fake:
        yield fake


def push_all(
    server: FakeGrafana,
    credential: Credential = TOKEN,
    *,
    dashboards: list[dict[str, Any]] | None = None,
    groups: list[dict[str, Any]] | None = None,
    prometheus: str = "http://prometheus:9090",
    marks: list[Mark] | None = None,
) -> list[str]:
    said: list[str] = []
    push(
        Grafana(server.url, credential, said.append),
        [board.json(DATASOURCE_UID) for board in BOARDS] if dashboards is None else dashboards,
        [for_grafana(FOLDER_UID, DATASOURCE_UID)] if groups is None else groups,
        prometheus=(prometheus, "5s"),
        marks={"some-run": MARKS if marks is None else marks},
    )
    return said


@pytest.mark.parametrize("credential", [TOKEN, (USER, PASSWORD)], ids=["token", "basic"])
def test_an_empty_grafana_gets_everything(server: FakeGrafana, credential: Credential) -> None:
    push_all(server, credential)
    assert server.folders[FOLDER_UID]["title"] == "Roadstead"
    source = server.datasources[DATASOURCE_UID]
    assert (source["type"], source["url"], source["jsonData"]["timeInterval"]) == (
        *("prometheus", "http://prometheus:9090", "5s"),
    )
    assert {uid: d["title"] for uid, d in server.dashboards.items()} == {b.uid: b.title for b in BOARDS}
    stored = server.groups[FOLDER_UID, GROUP]
    assert [rule["title"] for rule in stored["rules"]] == [r["title"] for r in for_grafana("f", "d")["rules"]]
    assert {rule["data"][0]["datasourceUid"] for rule in stored["rules"]} == {DATASOURCE_UID}
    (resume, bad) = server.annotations.values()
    assert resume["tags"] == ["roadstead", "some-run", "resume", "some-run/attempt-1"]
    assert (resume["time"], resume["timeEnd"]) == (MARKS[0].begin, MARKS[0].begin)
    assert (bad["time"], bad["timeEnd"], bad["text"]) == (MARKS[1].begin, MARKS[1].end, "step 3 is broken")


def test_pushing_again_writes_nothing(server: FakeGrafana) -> None:
    push_all(server)
    server.calls.clear()
    said = push_all(server)
    assert server.writes() == []
    assert all("as it should be" in line or "2 there" in line for line in said), said


def test_what_changed_is_brought_up_to_date_and_the_rest_is_left(server: FakeGrafana) -> None:
    push_all(server)
    uids = {rule["title"]: rule["uid"] for rule in server.groups[FOLDER_UID, GROUP]["rules"]}
    server.calls.clear()
    boards = [board.json(DATASOURCE_UID) for board in BOARDS]
    boards[2]["panels"][1]["title"] = "Another title"
    group = for_grafana(FOLDER_UID, DATASOURCE_UID)
    gone = group["rules"].pop(3)["title"]
    group["rules"][0]["for"] = "20m"
    grown = replace(MARKS[1], end=1_700_000_900_000)
    push_all(server, dashboards=boards, groups=[group], prometheus="http://other:9090", marks=[MARKS[0], grown])
    assert [method + " " + path.split("/")[2] for method, path in server.writes()] == [
        *("PUT datasources", "POST dashboards", "PUT v1", "PUT annotations"),
    ]
    assert server.dashboards[BOARDS[2].uid]["panels"][1]["title"] == "Another title"
    after = {rule["title"]: rule["uid"] for rule in server.groups[FOLDER_UID, GROUP]["rules"]}
    assert after == {title: uid for title, uid in uids.items() if title != gone}, (
        "a rule keeps its uid, hence its state"
    )
    assert server.datasources[DATASOURCE_UID]["url"] == "http://other:9090"
    assert [a["timeEnd"] for a in server.annotations.values()] == [MARKS[0].begin, grown.end]


def test_marks_of_another_run_are_left_alone(server: FakeGrafana) -> None:
    push_all(server)
    other = Mark("other-run", "resume", "attempt-1", "attempt 1 begins", 1_600_000_000_000)
    Grafana(server.url, TOKEN, lambda line: None).marks("other-run", [other])
    Grafana(server.url, TOKEN, lambda line: None).marks("other-run", [other])
    assert [a["tags"][1] for a in server.annotations.values()] == ["some-run", "some-run", "other-run"]


def test_a_grafana_behind_a_path_is_found() -> None:
    with grafana(prefix="/monitoring/grafana") as fake:
        push_all(fake)
        assert len(fake.dashboards) == len(BOARDS)


@pytest.mark.parametrize(
    ("credential", "status", "reason", "hint"),
    [
        ("glsa_wrong", "401", "Invalid API key", "token or password is wrong"),
        ((USER, "wrong"), "401", "Invalid username or password", "token or password is wrong"),
        (VIEWER, "403", "additional permissions", "role Editor"),
    ],
)
def test_a_refused_login_is_told_with_the_servers_reason(
    server: FakeGrafana, credential: Credential, status: str, reason: str, hint: str
) -> None:
    with pytest.raises(GrafanaRefused) as refused:
        push_all(server, credential)
    assert all(word in str(refused.value) for word in (server.url, status, reason, hint, "folder 'Roadstead'"))


@pytest.mark.parametrize(
    ("part", "status", "reason"),
    [
        ("/api/dashboards/db", 412, "The dashboard has been changed by someone else"),
        ("/api/dashboards/db", 400, "Dashboard title cannot be empty"),
        ("/api/v1/provisioning/folder/roadstead/rule-groups/roadstead", 400, "invalid alert rule: no such receiver"),
        ("/api/v1/provisioning/folder/roadstead/rule-groups/roadstead", 403, "quota reached"),
        ("/api/datasources", 409, "data source with the same name already exists"),
        ("/api/annotations", 500, "database is locked"),
    ],
)
def test_a_refusal_names_the_piece_and_the_reason(server: FakeGrafana, part: str, status: int, reason: str) -> None:
    def refuse(method: str, path: str) -> None:
        if method != "GET" and path == part:
            raise Refusal(status, reason)

    server.refuse = refuse
    with pytest.raises(GrafanaRefused) as refused:
        push_all(server)
    assert str(status) in str(refused.value) and reason in str(refused.value)
    server.refuse = lambda method, path: None
    push_all(server)
    assert len(server.dashboards) == len(BOARDS) and len(server.annotations) == 2, "pushing again completes it"


def test_no_server_is_told_as_such() -> None:
    with grafana() as fake:
        pass
    with pytest.raises(GrafanaRefused, match="does not answer"):
        push_all(fake)


def test_an_address_that_is_none_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="localhost:3000"):
        Grafana("localhost:3000", TOKEN, print)


def test_the_contract_refuses_what_grafana_would_not_understand(server: FakeGrafana) -> None:
    """Otherwise the tests above could not fail."""
    group = for_grafana(FOLDER_UID, DATASOURCE_UID)
    group["rules"][0]["noDataState"] = "Normal"
    with pytest.raises(GrafanaRefused, match="Normal"):
        push_all(server, groups=[group])
    group = for_grafana(FOLDER_UID, DATASOURCE_UID)
    del group["rules"][0]["annotations"]["__panelId__"]
    with pytest.raises(GrafanaRefused, match="both annotations"):
        push_all(server, groups=[group])
    group = for_grafana(FOLDER_UID, DATASOURCE_UID)
    group["rules"][0]["uid"] = "of-our-own"
    with pytest.raises(GrafanaRefused, match="500"):
        Grafana(server.url, TOKEN, print).rules(group)


def test_urllib3_is_the_real_one_with_grafana_client_beside_it() -> None:
    """grafana-client's fork of urllib3, installed carelessly, lies over it under boto3."""
    code = "import grafana_client, niquests, boto3, urllib3, urllib3_future; print(urllib3.__version__)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (
        answer.stdout.strip() == importlib.metadata.version("urllib3") != importlib.metadata.version("urllib3-future")
    )
    files = importlib.metadata.files("urllib3-future") or []
    assert not [file for file in files if file.parts[0] == "urllib3" or file.suffix == ".pth"]
