"""Everything into a Grafana: folder, data source, dashboards, alert rules, annotations.

Owns: the calls, and what a refusal says. Never touches: what it did not put there itself: other folders, other data
sources, other people's annotations.
Invariant: pushing again changes nothing that is already as it should be; every piece is found again by its uid, its
title or its key.
A crash leaves: the pieces pushed so far; pushing again completes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from grafana_client.api import GrafanaApi
from grafana_client.client import GrafanaClientError, GrafanaException
from niquests.exceptions import RequestException

from roadstead.dashboards.grafana import DATASOURCE_UID, FOLDER_UID
from roadstead.dashboards.grafana.marks import Mark

FOLDER_TITLE, DATASOURCE_NAME = "Roadstead", "Roadstead Prometheus"
TAG = "roadstead"
Json = dict[str, Any]
Credential = str | tuple[str, str] | None
"""A service account token, or user name and password."""

_TIMEOUT_S = 20.0
_MOST_MARKS = 100_000
"""Annotations of a run that are asked for; Grafana gives 100 unless told."""


class GrafanaRefused(RuntimeError):
    """The server said no, or can't be reached; the text has its reason."""


class Grafana:
    """One server, one folder in it."""

    def __init__(self, url: str, credential: Credential, tell: Callable[[str], None]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of a Grafana; give one like http://localhost:3000")
        path = parts.path.strip("/")
        self._url, self._tell = url, tell
        # Any: its methods ship no types.
        self._api: Any = GrafanaApi(
            credential,
            host=parts.hostname,
            port=parts.port,
            protocol=parts.scheme,
            url_path_prefix=f"{path}/" if path else "",  # the client joins it as it is
            timeout=_TIMEOUT_S,
        )

    def folder(self) -> None:
        with self._asking(f"folder {FOLDER_TITLE!r}"):
            if _found(lambda: self._api.folder.get_folder(FOLDER_UID)) is None:
                self._api.folder.create_folder(FOLDER_TITLE, uid=FOLDER_UID)
                self._tell(f"folder {FOLDER_TITLE!r}: made")

    def datasource(self, prometheus_url: str, scrape_interval: str) -> str:
        """The data source of ours, made or brought up to date. Its uid."""
        body = {
            "uid": DATASOURCE_UID,
            "name": DATASOURCE_NAME,
            "type": "prometheus",
            "access": "proxy",
            "url": prometheus_url,
            # Grafana derives $__rate_interval from it, and takes 15 s unless told.
            "jsonData": {"httpMethod": "POST", "timeInterval": scrape_interval},
        }
        with self._asking(f"data source {DATASOURCE_NAME!r}"):
            there = _found(lambda: self._api.datasource.get_datasource_by_uid(DATASOURCE_UID))
            if there is None:
                self._api.datasource.create_datasource(body)
            elif not _has(there, body):
                self._api.datasource.update_datasource_by_uid(DATASOURCE_UID, body)
            self._told("data source", DATASOURCE_NAME, there is None, there is not None and _has(there, body))
        return DATASOURCE_UID

    def dashboard(self, dashboard: Json) -> None:
        with self._asking(f"dashboard {dashboard['title']!r}"):
            there = _found(lambda: self._api.dashboard.get_dashboard(dashboard["uid"]))
            same = there is not None and _has(there["dashboard"], dashboard)
            if not same:  # every save is a version in the dashboard's history
                body = {"dashboard": dashboard, "folderUid": FOLDER_UID, "overwrite": True, "message": "roadstead"}
                self._api.dashboard.update_dashboard(body)
            self._told("dashboard", dashboard["title"], there is None, same)

    def rules(self, group: Json) -> None:
        """An alert rule group; rules of it that are not in `group` any more go.

        Rules keep the uid that the server gave them, found by title: Grafana before 11.5.2 answers 500 to a new rule
        that comes with a uid of its own (grafana/grafana issue 98283), and a rule without one is another rule, which
        forgets that it was firing.
        """
        title = group["title"]
        with self._asking(f"alert rules {title!r}"):
            there = _found(lambda: self._api.alertingprovisioning.get_rule_group(FOLDER_UID, title))
            uids = {rule["title"]: rule["uid"] for rule in (there or {}).get("rules", [])}
            known = [rule | ({"uid": uids[rule["title"]]} if rule["title"] in uids else {}) for rule in group["rules"]]
            body = group | {"rules": known}
            same = there is not None and _has(there, body) and len(there["rules"]) == len(known)
            if not same:
                # Without provenance people may change thresholds and routing in Grafana, until the next push.
                self._api.alertingprovisioning.update_rule_group(FOLDER_UID, title, body, disable_provenance=True)
            self._told("alert rules", title, there is None, same)

    def marks(self, run: str, marks: Sequence[Mark]) -> None:
        """Annotations of a run, each tagged with its key: `roadstead`, the run, the kind, the key."""
        with self._asking(f"annotations of {run!r}"):
            there = self._api.annotations.find_annotations(tags=[TAG, run], limit=_MOST_MARKS)
            known = {tag: annotation for annotation in there for tag in annotation.get("tags") or ()}
            made = changed = 0
            for mark in marks:
                values = {"time_from": mark.begin, "time_to": mark.end or mark.begin, "text": mark.text}
                tags = [TAG, run, mark.kind, mark.key]
                old = known.get(mark.key)
                if old is None:
                    self._api.annotations.add_annotation(tags=tags, **values)
                    made += 1
                elif (old["time"], old.get("timeEnd") or old["time"], old["text"]) != tuple(values.values()):
                    self._api.annotations.update_annotation(old["id"], tags=tags, **values)
                    changed += 1
            self._tell(f"annotations of {run!r}: {made} made, {changed} changed, {len(marks) - made - changed} there")

    def _told(self, what: str, name: str, new: bool, same: bool) -> None:
        self._tell(f"{what} {name!r}: {'made' if new else 'is as it should be' if same else 'brought up to date'}")

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except GrafanaException as error:
            raise GrafanaRefused(f"{self._url} refuses {what}: {_reason(error)}") from error
        except RequestException as error:
            raise GrafanaRefused(f"{self._url} does not answer ({what}): {error}; is a Grafana there?") from error


def push(
    grafana: Grafana,
    dashboards: Sequence[Json],
    groups: Sequence[Json],
    *,
    prometheus: tuple[str, str] | None,
    marks: Mapping[str, Sequence[Mark]],
) -> None:
    """All of it, in the order in which one needs the other. Raises GrafanaRefused.

    `prometheus`: address of the server as Grafana reaches it, and its scrape interval; None: the data source that
    the dashboards and rules name is there already. `marks`: by run.
    """
    grafana.folder()
    if prometheus is not None:
        grafana.datasource(*prometheus)
    for dashboard in dashboards:
        grafana.dashboard(dashboard)
    for group in groups:
        grafana.rules(group)
    for run, moments in marks.items():
        grafana.marks(run, moments)


def _found(ask: Callable[[], Any]) -> Any:
    """None for 404."""
    try:
        return ask()
    except GrafanaClientError as error:
        if error.status_code != 404:
            raise
        return None


def _has(there: Any, wanted: Any) -> bool:
    """Whether `there` holds everything in `wanted`. The server adds fields of its own (id, version, orgId)."""
    if isinstance(wanted, dict) and isinstance(there, dict):
        return all(key in there and _has(there[key], value) for key, value in wanted.items())
    if isinstance(wanted, list) and isinstance(there, list):
        return len(there) == len(wanted) and all(map(_has, there, wanted))
    return bool(there == wanted)


_MEANING = {
    401: "the token or password is wrong or has expired",
    403: "the account may not do that; it needs the role Editor, and Admin for the data source",
    412: "somebody else changed it meanwhile",
}


def _reason(error: GrafanaException) -> str:
    """The server's words, and what the status usually means."""
    answer = error.response
    said = answer.get("message") or answer.get("msg") or answer if isinstance(answer, dict) else answer
    hint = f" ({_MEANING[error.status_code]})" if error.status_code in _MEANING else ""
    return f"{error.status_code} {str(said).strip() or 'without a reason'}{hint}"
