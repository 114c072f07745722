"""SQL over a run's log, with DuckDB on S3.

Owns: the connection and its views. Never touches: the log; a query reads, `refresh` of the index aside.
Invariant: views name the objects that commits name, never a listing: an orphan of a killed attempt is in no answer.
A crash leaves: nothing.

Views: `rows` (the scalars of every trained row, from the index), `batches` (every column, tokens and texts included),
`train` (what the trainer computed). Join them on step, group_id, member.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import duckdb

from roadstead.storage import batches
from roadstead.storage.audit import index
from roadstead.storage.keys import RunKeys
from roadstead.storage.objects import ObjectStore, StoreAddress, StoreError

_THREADS = 16


def connect(store: ObjectStore, keys: RunKeys) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection on the run's log: `connect(store, keys).sql("from rows limit 5")`.

    Raises StoreError when the store does not answer, or DuckDB's S3 reader (httpfs) is neither installed nor to be had.
    """
    steps = index.refresh(store, keys)
    connection = duckdb.connect()
    load_httpfs(connection)
    connection.execute(secret(store.address))
    with ThreadPoolExecutor(_THREADS) as pool:
        commits = [c for c in pool.map(lambda step: batches.find(store, keys, step), range(steps)) if c]
        trained = pool.map(lambda c: store.exists(keys.train_rows(c.step, c.digest)), commits)
        train = [keys.train_rows(c.step, c.digest) for c, there in zip(commits, trained, strict=True) if there]
    # DuckDB would take `step` from the folder's name, as text, over the file's own column.
    own = "hive_partitioning = false"
    _view(connection, "rows", [store.url(keys.index_rows)] if steps else [], own)
    _view(connection, "batches", [store.url(commit.data.key) for commit in commits], own)
    # A train file has no step of its own.
    _view(connection, "train", [store.url(key) for key in train], "hive_types = {'step': BIGINT}")
    return connection


def load_httpfs(connection: duckdb.DuckDBPyConnection) -> None:
    """The extension from the `duckdb_extension_httpfs` package, offline; else DuckDB's own download."""
    package = importlib.util.find_spec("duckdb_extension_httpfs")
    try:
        if package is not None and package.origin is not None:
            folder = Path(package.origin).parent / "extensions" / f"v{duckdb.__version__}"
            connection.load_extension(str(folder / "httpfs.duckdb_extension"))
        else:
            connection.install_extension("httpfs")
            connection.load_extension("httpfs")
    except (duckdb.Error, OSError) as error:
        raise StoreError(
            f"DuckDB {duckdb.__version__} can't load its S3 reader (httpfs): {error}; "
            f"pip install duckdb_extension_httpfs=={duckdb.__version__}"
        ) from error


def secret(address: StoreAddress) -> str:
    """The `create secret` statement for a store; keys of the usual AWS chain when the address has none."""
    parts = {"type": "s3", "region": address.region}
    if address.access_key and address.secret_key:
        parts |= {"key_id": address.access_key, "secret": address.secret_key}
    elif found := boto3.session.Session().get_credentials():
        frozen = found.get_frozen_credentials()
        parts |= {"key_id": frozen.access_key or "", "secret": frozen.secret_key or ""}
        parts |= {"session_token": frozen.token} if frozen.token else {}
    if address.endpoint_url:
        place = urlsplit(address.endpoint_url)
        parts |= {"endpoint": place.netloc, "url_style": "path", "use_ssl": str(place.scheme == "https").lower()}
    return "create or replace secret (" + ", ".join(f"{k} {_quoted(v)}" for k, v in parts.items()) + ")"


def _view(connection: duckdb.DuckDBPyConnection, name: str, urls: Sequence[str], options: str) -> None:
    if urls:
        files = "[" + ", ".join(_quoted(url) for url in urls) + "]"
        connection.execute(f"create view {name} as from read_parquet({files}, {options})")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
