"""The object store as the rest of Roadstead sees it: immutable objects, created once, checked by digest.

Owns: the S3 client, its retries and deadlines, conditional creation, and the probe that refuses a store which
ignores conditions.
Never touches: the meaning of what it stores; Parquet; run layout.
Invariant: `put_once` never replaces an object. Whatever the network did, it ends in one of: created by us, the
same bytes were there, or `ObjectConflict`.
A crash leaves: either the whole object or none. Every object goes up in ONE PutObject, because conditional
CompleteMultipartUpload lets several concurrent completions win on real stores (SeaweedFS, moto: measured).
"""

from __future__ import annotations

import enum
import hashlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import boto3
import botocore.config
import botocore.exceptions
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# One retry layer only: nested ones multiply (25 attempts, 37 s for a permanent 503 were seen with two).
_ATTEMPTS = 8
_CONNECT_S, _READ_S = 5, 60
_LARGEST_PUT = 5 << 30
"""S3's limit for a single PutObject; larger files must be sharded by whoever writes them."""


class StoreError(RuntimeError):
    """The store answered with an error that a retry did not cure."""


class ObjectMissing(StoreError):
    """No object under that key."""


class ObjectCorrupt(StoreError):
    """The object's bytes are not those its digest promises."""


class ObjectConflict(StoreError):
    """The key is taken by other content. Both digests are named; nothing was written."""


class UnsafeStore(StoreError):
    """The store ignores conditional writes: with it, two writers could both believe they committed."""


class Put(enum.Enum):
    CREATED = "created"
    ALREADY = "already"


@dataclass(frozen=True)
class StoreAddress:
    """Where the bucket is. Empty keys mean the usual AWS credential chain."""

    bucket: str
    endpoint_url: str | None = None
    region: str = "us-east-1"
    access_key: str | None = None
    secret_key: str | None = None
    attempts: int = _ATTEMPTS
    """Tries of one request, the first included; health checks want 1."""


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> bytes:
    """One byte form for a value, so that equal records have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _code(error: BaseException) -> str:
    if not isinstance(error, botocore.exceptions.ClientError):
        return ""
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: BaseException) -> int:
    if not isinstance(error, botocore.exceptions.ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


class ObjectStore:
    """Thread-safe; not fork-safe (make one a process)."""

    def __init__(self, address: StoreAddress) -> None:
        self.address = address
        self._client: S3Client = boto3.session.Session().client(
            "s3",
            endpoint_url=address.endpoint_url,
            region_name=address.region,
            aws_access_key_id=address.access_key,
            aws_secret_access_key=address.secret_key,
            config=botocore.config.Config(
                retries={"mode": "standard", "total_max_attempts": address.attempts},
                connect_timeout=_CONNECT_S,
                read_timeout=_READ_S,
                max_pool_connections=32,
                # Default checksums break several S3-compatible stores; we carry our own digests anyway.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path"},
            ),
        )

    # -- writing ------------------------------------------------------------------------------------------

    def put_once(self, key: str, body: bytes) -> Put:
        """Create `key`. Raises ObjectConflict when other bytes are there."""
        if self._create(key, body):
            return Put.CREATED
        there = self.get(key)
        if there != body:
            raise ObjectConflict(
                f"{self.url(key)}: holds sha256 {sha256(there)}, refused to write sha256 {sha256(body)}; objects "
                "are immutable: two writers disagree about it, find out which attempt wrote the first"
            )
        return Put.ALREADY

    def create(self, key: str, body: bytes) -> Put:
        """Create `key` unless something is there, whatever it holds: for callers that compare by content."""
        return Put.CREATED if self._create(key, body) else Put.ALREADY

    def put_file_once(self, key: str, path: Path, digest: str) -> Put:
        """Create `key` from a file whose sha256 is `digest`. Raises ObjectConflict."""
        if path.stat().st_size > _LARGEST_PUT:
            raise StoreError(f"{path}: {path.stat().st_size} bytes is over S3's 5 GiB a PutObject; shard it")
        with path.open("rb") as file:
            if self._create(key, file):
                return Put.CREATED
        hasher = hashlib.sha256()
        for chunk in self._chunks(key):
            hasher.update(chunk)
        if hasher.hexdigest() != digest:
            raise ObjectConflict(
                f"{self.url(key)}: holds sha256 {hasher.hexdigest()}, refused to write sha256 {digest}"
            )
        return Put.ALREADY

    def put_hint(self, key: str, body: bytes) -> None:
        """Overwrite a hint. Nothing may depend on it being right."""
        self._client.put_object(Bucket=self.address.bucket, Key=key, Body=body)

    def _create(self, key: str, body: bytes | IO[bytes]) -> bool:
        """True: ours is there. False: something was there already (perhaps ours, after a lost answer)."""

        def attempt() -> bool:
            if not isinstance(body, bytes):
                body.seek(0)
            try:
                self._client.put_object(Bucket=self.address.bucket, Key=key, Body=body, IfNoneMatch="*")
            except botocore.exceptions.ClientError as error:
                if _status(error) == 412:
                    return False
                raise
            return True

        # 409 ConditionalRequestConflict means that nothing landed: only 412 means "exists".
        retrying = Retrying(
            retry=retry_if_exception(lambda e: _status(e) == 409),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.1, max=2),
            reraise=True,
        )
        try:
            return retrying(attempt)
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
            raise self._error("write", key, error) from error

    # -- reading ------------------------------------------------------------------------------------------

    def get(self, key: str, digest: str | None = None) -> bytes:
        """The object's bytes. Raises ObjectMissing; ObjectCorrupt when `digest` (sha256) does not match."""
        body = b"".join(self._chunks(key))
        if digest is not None and sha256(body) != digest:
            raise ObjectCorrupt(
                f"{self.url(key)}: sha256 {sha256(body)}, expected {digest}; it was tampered with or damaged"
            )
        return body

    def find(self, key: str) -> bytes | None:
        """The object's bytes, or None when there is none."""
        try:
            return self.get(key)
        except ObjectMissing:
            return None

    def get_file(self, key: str, path: Path, digest: str) -> None:
        """Stream `key` to `path`, which appears whole or not at all. Raises ObjectMissing, ObjectCorrupt."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
        hasher = hashlib.sha256()
        try:
            with part.open("wb") as file:
                for chunk in self._chunks(key):
                    hasher.update(chunk)
                    file.write(chunk)
            if hasher.hexdigest() != digest:
                raise ObjectCorrupt(f"{self.url(key)}: sha256 {hasher.hexdigest()}, expected {digest}")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def exists(self, key: str) -> bool:
        try:
            self._client.head_object(Bucket=self.address.bucket, Key=key)
        except botocore.exceptions.ClientError as error:
            if _status(error) == 404:
                return False
            raise self._error("read", key, error) from error
        except botocore.exceptions.BotoCoreError as error:
            raise self._error("read", key, error) from error
        return True

    def keys(self, prefix: str) -> Iterator[str]:
        """Keys under `prefix`, for people and clean-up. Nothing that must be right starts from a listing."""
        try:
            for page in self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.address.bucket, Prefix=prefix
            ):
                for entry in page.get("Contents", []):
                    yield entry["Key"]
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
            raise self._error("list", prefix, error) from error

    def folders(self, prefix: str) -> list[str]:
        """Names directly under `prefix`."""
        names: list[str] = []
        for page in self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.address.bucket, Prefix=prefix, Delimiter="/"
        ):
            names += [p["Prefix"][len(prefix) :].rstrip("/") for p in page.get("CommonPrefixes", [])]
        return sorted(names)

    def _chunks(self, key: str) -> Iterator[bytes]:
        try:
            answer = self._client.get_object(Bucket=self.address.bucket, Key=key)
            yield from answer["Body"].iter_chunks(1 << 20)
        except botocore.exceptions.ClientError as error:
            if _code(error) in {"NoSuchKey", "404"} or _status(error) == 404:
                raise ObjectMissing(f"{self.url(key)}: no such object") from error
            raise self._error("read", key, error) from error
        except botocore.exceptions.BotoCoreError as error:
            raise self._error("read", key, error) from error

    # -- the store itself ---------------------------------------------------------------------------------

    def ensure_bucket(self) -> None:
        try:
            self._client.create_bucket(Bucket=self.address.bucket)
        except botocore.exceptions.ClientError as error:
            if _code(error) not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                raise self._error("create bucket", "", error) from error
        except botocore.exceptions.BotoCoreError as error:
            raise self._error("create bucket", "", error) from error

    def probe(self) -> None:
        """Write one object twice under a condition. Raises UnsafeStore when the second write wins too."""
        key = f".probe/{uuid.uuid4().hex}"
        first, second = self._create(key, b"first"), self._create(key, b"second")
        held = self.get(key)
        self._client.delete_object(Bucket=self.address.bucket, Key=key)
        if not first or second or held != b"first":
            raise UnsafeStore(
                f"{self.url('')}: a conditional PutObject (If-None-Match: *) replaced an existing object; "
                "Roadstead's commits are not safe there: use a store that honours it (AWS S3, SeaweedFS >= 4.48)"
            )

    def url(self, key: str) -> str:
        return f"s3://{self.address.bucket}/{key}"

    def _error(self, verb: str, key: str, error: Exception) -> StoreError:
        where = self.address.endpoint_url or "AWS"
        hint = {
            "RequestTimeTooSkewed": "; this machine's clock is off: synchronise it",
            "AccessDenied": "; the credentials may not do this: check the policy",
            "InvalidAccessKeyId": "; unknown access key",
            "SignatureDoesNotMatch": "; wrong secret key",
        }.get(_code(error), "")
        return StoreError(f"{self.url(key)} at {where}: can't {verb}: {error}{hint}")
