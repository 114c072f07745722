"""A double of Grafana's HTTP API, as far as `roadstead dashboards push` uses it: it keeps what it is given.

The contract: paths, fields, required fields, types and patterns are those of Grafana's own OpenAPI document, read from
the models and responses of its generated client, grafana/grafana-openapi-client-go (Apache-2.0): AlertRuleGroup,
ProvisionedAlertRule, AlertQuery, RelativeTimeRange, PostAnnotationsCmd, Annotation, SaveDashboardCommand,
AddDataSourceCommand, UpdateDataSourceCommand, and the responses of those calls. A body with a field that is not in it
is refused, which a real server would ignore.

Behaviour that the document does not say is that of released servers, each with its source:
- a rule in a group that comes with a uid which is not there yet: 500, before 11.5.2 (grafana/grafana issue 98283);
- `__dashboardUid__` without `__panelId__`: refused (SetDashboardAndPanelFromAnnotations);
- titles of rules are unique in a folder (issue 43066);
- a save without `overwrite` on a dashboard that is there: 412 (documentation of the dashboard API).

It was not recorded from a running Grafana.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from jsonschema import Draft7Validator

TOKEN, USER, PASSWORD, VIEWER = "glsa_editor", "admin", "secret", "glsa_viewer"


def _object(required: str = "", /, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


_TEXT, _NUMBER, _FLAG, _FREE = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "object"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_UID = {"type": "string", "pattern": "^[a-zA-Z0-9-_]+$", "minLength": 1, "maxLength": 40}
_NAME = {"type": "string", "minLength": 1, "maxLength": 190}
_OR_NULL = {"type": ["integer", "null"]}

_QUERY = _object(
    datasourceUid=_TEXT,
    model=_FREE,
    queryType=_TEXT,
    refId=_TEXT,
    relativeTimeRange=_object(**{"from": _NUMBER, "to": _NUMBER}),
)
_RULE = _object(
    "condition data execErrState folderUID for noDataState orgID ruleGroup title",
    annotations=_TEXTS,
    condition=_TEXT,
    data={"type": "array", "items": _QUERY, "minItems": 1},
    execErrState={"enum": ["OK", "Alerting", "Error"]},
    folderUID=_TEXT,
    id=_NUMBER,
    isPaused=_FLAG,
    labels=_TEXTS,
    noDataState={"enum": ["Alerting", "NoData", "OK"]},
    orgID=_NUMBER,
    provenance=_TEXT,
    ruleGroup=_NAME,
    title=_NAME,
    uid=_UID,
    updated=_TEXT,
    **{"for": {"type": "string", "pattern": r"^(\d+[smhd])+$"}},
)
_DATASOURCE = _object(
    "name type access",  # documented as required in the examples of the data source API
    access={"enum": ["proxy", "direct"]},
    basicAuth=_FLAG,
    basicAuthUser=_TEXT,
    database=_TEXT,
    isDefault=_FLAG,
    jsonData=_FREE,
    name=_TEXT,
    secureJsonData=_TEXTS,
    type=_TEXT,
    uid=_UID,
    url=_TEXT,
    user=_TEXT,
    version=_NUMBER,
    withCredentials=_FLAG,
)
CONTRACT: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/api/folders"): _object("title", title=_TEXT, uid=_UID, parentUid=_TEXT, description=_TEXT),
    ("POST", "/api/datasources"): _DATASOURCE,
    ("PUT", "/api/datasources/uid/{}"): _DATASOURCE,
    ("POST", "/api/dashboards/db"): _object(
        "dashboard",
        dashboard={"type": "object", "required": ["title", "uid", "panels"], "properties": {"uid": _UID}},
        folderId=_NUMBER,
        folderUid=_TEXT,
        message=_TEXT,
        overwrite=_FLAG,
    ),
    ("PUT", "/api/v1/provisioning/folder/{}/rule-groups/{}"): _object(
        folderUid=_TEXT, interval=_NUMBER, rules={"type": "array", "items": _RULE}, title=_TEXT
    ),
    # The client sends null for what it was not given; Grafana reads null as 0.
    ("POST", "/api/annotations"): _object(
        "text",
        dashboardId=_NUMBER,
        dashboardUID=_TEXT,
        data=_FREE,
        panelId=_OR_NULL,
        tags={"type": "array", "items": _TEXT},
        text=_TEXT,
        time=_NUMBER,
        timeEnd=_OR_NULL,
    ),
    ("PUT", "/api/annotations/{}"): _object(
        id=_NUMBER, data=_FREE, tags={"type": "array", "items": _TEXT}, text=_TEXT, time=_NUMBER, timeEnd=_OR_NULL
    ),
}


class Refusal(Exception):
    def __init__(self, status: int, message: str, /, **more: Any) -> None:
        super().__init__(message)
        self.status, self.body = status, {"message": message, **more}


@dataclass
class FakeGrafana:
    url: str = ""
    folders: dict[str, dict[str, Any]] = field(default_factory=dict)
    datasources: dict[str, dict[str, Any]] = field(default_factory=dict)
    dashboards: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    groups: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    annotations: dict[int, dict[str, Any]] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    refuse: Callable[[str, str], None] = lambda method, path: None
    """Called before each answer; raises Refusal to plant one."""
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def writes(self) -> list[tuple[str, str]]:
        return [(method, path) for method, path in self.calls if method != "GET"]

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any, login: str) -> Any:
        self.calls.append((method, path))
        self._authorize(method, login)
        self.refuse(method, path)
        parts = [unquote(part) for part in path.strip("/").split("/")]
        pattern, arguments = _pattern(parts)
        if (schema := CONTRACT.get((method, pattern))) is not None:
            faults = [f"{'/'.join(map(str, e.absolute_path))}: {e.message}" for e in _errors(schema, body)]
            if faults:
                raise Refusal(400, f"bad request data: {'; '.join(faults)}"[:2000])
        if (handler := _HANDLERS.get((method, pattern))) is None:
            raise Refusal(404, f"{method} {path}: Not found")
        return handler(self, *arguments, **({"query": query} if method == "GET" else {"body": body}))

    def _authorize(self, method: str, login: str) -> None:
        basic = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if login == f"Bearer {VIEWER}":
            if method != "GET":
                raise Refusal(403, "You'll need additional permissions to perform this action. Permissions needed: x")
        elif login not in {f"Bearer {TOKEN}", basic}:
            raise Refusal(401, "Invalid API key" if login.startswith("Bearer") else "Invalid username or password")

    # -- folders and data sources -------------------------------------------------------------------------

    def get_folder(self, uid: str, query: Any) -> Any:
        if uid not in self.folders:
            raise Refusal(404, "folder not found", status="not-found")
        return self.folders[uid]

    def post_folder(self, body: Any) -> Any:
        if body["uid"] in self.folders:
            raise Refusal(412, "the folder has been changed by someone else", status="version-mismatch")
        self.folders[body["uid"]] = {"id": next(self._ids), "version": 1, **body}
        return self.folders[body["uid"]]

    def get_datasource(self, uid: str, query: Any) -> Any:
        if uid not in self.datasources:
            raise Refusal(404, "Data source not found")
        return self.datasources[uid]

    def post_datasource(self, body: Any) -> Any:
        if any(other["name"] == body["name"] for other in self.datasources.values()):
            raise Refusal(409, "data source with the same name already exists")
        self.datasources[body["uid"]] = {"id": next(self._ids), "orgId": 1, "readOnly": False, **body}
        return {"datasource": self.datasources[body["uid"]], "message": "Datasource added", "name": body["name"]}

    def put_datasource(self, uid: str, body: Any) -> Any:
        self.datasources[uid] = {**self.get_datasource(uid, None), **body}
        return {"datasource": self.datasources[uid], "message": "Datasource updated", "name": body["name"]}

    # -- dashboards ---------------------------------------------------------------------------------------

    def get_dashboard(self, uid: str, query: Any) -> Any:
        if uid not in self.dashboards:
            raise Refusal(404, "Dashboard not found")
        stored = {**self.dashboards[uid], "id": 1, "version": self.versions[uid]}
        return {"dashboard": stored, "meta": {"slug": uid, "version": self.versions[uid]}}

    def post_dashboard(self, body: Any) -> Any:
        dashboard = body["dashboard"]
        if body.get("folderUid") not in self.folders:
            raise Refusal(400, "folder not found", status="not-found")
        if dashboard["uid"] in self.dashboards and not body.get("overwrite"):
            raise Refusal(412, "The dashboard has been changed by someone else", status="version-mismatch")
        self.dashboards[dashboard["uid"]] = dashboard
        self.versions[dashboard["uid"]] = self.versions.get(dashboard["uid"], 0) + 1
        return {"id": 1, "uid": dashboard["uid"], "status": "success", "version": self.versions[dashboard["uid"]]}

    # -- alert rules --------------------------------------------------------------------------------------

    def get_group(self, folder: str, group: str, query: Any) -> Any:
        if (folder, group) not in self.groups:
            raise Refusal(404, "rule group not found")
        return self.groups[folder, group]

    def put_group(self, folder: str, group: str, body: Any) -> Any:
        if folder not in self.folders:
            raise Refusal(400, "invalid alert rule: folder does not exist")
        before = {rule["uid"]: rule for rule in self.groups.get((folder, group), {"rules": []})["rules"]}
        titles = [rule["title"] for rule in body["rules"]]
        rules = []
        for rule in body["rules"]:
            if titles.count(rule["title"]) > 1:
                raise Refusal(400, "rule title under the same organisation and folder should be unique")
            if ("__dashboardUid__" in rule["annotations"]) != ("__panelId__" in rule["annotations"]):
                raise Refusal(500, "both annotations __dashboardUid__ and __panelId__ must be specified")
            if rule["condition"] not in {query["refId"] for query in rule["data"]}:
                raise Refusal(400, f"invalid alert rule: condition {rule['condition']} not found in its queries")
            if "uid" in rule and rule["uid"] not in before:
                raise Refusal(500, "Internal Server Error", traceID="")
            uid = rule.get("uid", f"made{next(self._ids)}")
            # A server fills in what was left open.
            data = [{**q, "model": {**q["model"], "intervalMs": 1000, "maxDataPoints": 43200}} for q in rule["data"]]
            rules.append({**rule, "uid": uid, "id": next(self._ids), "isPaused": False, "data": data})
        self.groups[folder, group] = {**body, "rules": rules}
        return self.groups[folder, group]

    # -- annotations --------------------------------------------------------------------------------------

    def get_annotations(self, query: dict[str, list[str]]) -> Any:
        wanted, limit = set(query.get("tags", [])), int(query.get("limit", ["100"])[0])
        return [a for a in self.annotations.values() if wanted <= set(a["tags"])][:limit]

    def post_annotation(self, body: Any) -> Any:
        if not body["text"]:
            raise Refusal(400, "text field should not be empty")
        number = next(self._ids)
        self.annotations[number] = {**body, "id": number, "timeEnd": body.get("timeEnd") or body["time"]}
        return {"id": number, "message": "Annotation added"}

    def put_annotation(self, number: str, body: Any) -> Any:
        self.annotations[int(number)] |= {**body, "timeEnd": body.get("timeEnd") or body["time"]}
        return {"message": "Annotation updated"}


_HANDLERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("GET", "/api/folders/{}"): FakeGrafana.get_folder,
    ("POST", "/api/folders"): FakeGrafana.post_folder,
    ("GET", "/api/datasources/uid/{}"): FakeGrafana.get_datasource,
    ("POST", "/api/datasources"): FakeGrafana.post_datasource,
    ("PUT", "/api/datasources/uid/{}"): FakeGrafana.put_datasource,
    ("GET", "/api/dashboards/uid/{}"): FakeGrafana.get_dashboard,
    ("POST", "/api/dashboards/db"): FakeGrafana.post_dashboard,
    ("GET", "/api/v1/provisioning/folder/{}/rule-groups/{}"): FakeGrafana.get_group,
    ("PUT", "/api/v1/provisioning/folder/{}/rule-groups/{}"): FakeGrafana.put_group,
    ("GET", "/api/annotations"): FakeGrafana.get_annotations,
    ("POST", "/api/annotations"): FakeGrafana.post_annotation,
    ("PUT", "/api/annotations/{}"): FakeGrafana.put_annotation,
}


def _pattern(parts: list[str]) -> tuple[str, list[str]]:
    """The contract's path and what stands in its braces."""
    for _, pattern in _HANDLERS:
        wanted = pattern.strip("/").split("/")
        if len(wanted) == len(parts) and all(w in {"{}", p} for w, p in zip(wanted, parts, strict=True)):
            return pattern, [p for w, p in zip(wanted, parts, strict=True) if w == "{}"]
    return "/" + "/".join(parts), []


def _errors(schema: dict[str, Any], body: Any) -> Iterator[Any]:
    return Draft7Validator(schema).iter_errors(body)


@contextlib.contextmanager
def grafana(prefix: str = "") -> Iterator[FakeGrafana]:
    """One that listens on loopback for the length of the block. prefix: path under which it is served."""
    fake = FakeGrafana()

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            url = urlsplit(self.path)
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            try:
                if not url.path.startswith(f"{prefix}/api/"):
                    raise Refusal(404, f"{url.path}: Not found")
                path = url.path.removeprefix(prefix)
                login = self.headers.get("Authorization", "")
                status, answer = 200, fake.answer(self.command, path, parse_qs(url.query), body, login)
            except Refusal as refusal:
                status, answer = refusal.status, refusal.body
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _do

        def log_message(self, *_: Any) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}{prefix}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
