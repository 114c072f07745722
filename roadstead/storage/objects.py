"""The object store as the rest of Roadstead sees it: immutable objects, created once, checked by digest.

Owns: the S3 client, its retries and deadlines, conditional creation, and the probe that refuses a store which
ignores conditions.
Never touches: the meaning of what it stores; Parquet; run layout.
Invariant: `put_once` never replaces an object. Whatever the network did, it ends in one of: created by us, the
same bytes were there, or `ObjectConflict`.
A crash leaves: either the whole object or none. Every object goes up in ONE PutObject, because conditional
CompleteMultipartUpload lets several concurrent completions win on real stores (SeaweedFS, moto: measured). So there
are no multipart left-overs to clean either.

Faults: throttling, server errors, time-outs and broken connections are retried `attempts` times, at the front of a
request by botocore, in the middle of a body here; what outlasts that is a `StoreError` with the key and the remedy.
A body that arrives short or altered is refused by the store (sha256 sent with every write) or by the client
(sha256 kept by the store, checked on reading), and the transfer repeated.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import boto3
import botocore.config
import botocore.exceptions
import urllib3.exceptions
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")

# One retry layer only: nested ones multiply (25 attempts, 37 s for a permanent 503 were seen with two).
_ATTEMPTS = 8
_CONNECT_S, _READ_S = 5, 60
_LARGEST_PUT = 5 << 30
"""S3's limit for a single PutObject; larger files must be sharded by whoever writes them."""
_NOTHING_LANDED = {"ConditionalRequestConflict", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"}
"""Refusals of a write that botocore does not retry and that a second try cures: two conditional writers met (409;
only 412 means "exists"), or the body was damaged on its way."""
_REMEDIES = {
    "RequestTimeTooSkewed": "this machine's clock is off: synchronise it (NTP)",
    "AccessDenied": "the credentials may not do this: check the policy (reading alone is not enough for a run)",
    "InvalidAccessKeyId": "unknown access key",
    "SignatureDoesNotMatch": "wrong secret key",
    "NoSuchBucket": "make the bucket, or name another in storage.bucket",
    "SlowDown": "the store throttles: let fewer workers write at once, or raise its limits",
    "InsufficientStorage": "the store's disk or quota is full: free space, then resume the run",
    "BadDigest": "the body arrives damaged every time: look at what stands between here and the store",
}


class StoreError(RuntimeError):
    """The store answered with an error that a retry did not cure."""


class ObjectMissing(StoreError):
    """No object under that key."""


class ObjectCorrupt(StoreError):
    """The object's bytes are not those its digest promises."""


class ObjectConflict(StoreError):
    """The key is taken by other content. Both digests are named; nothing was written."""


class BrokenRead(StoreError):
    """An object's bytes broke off or arrived altered, as often as it was tried."""


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


def _nothing_landed(error: BaseException) -> bool:
    return _code(error) in _NOTHING_LANDED or _status(error) == 409


def _checksum(digest: str) -> str:
    """S3 writes a sha256 in base64."""
    return base64.b64encode(bytes.fromhex(digest)).decode()


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
            if self._create(key, file, digest):
                return Put.CREATED
        there = self._whole(lambda: self._hash(key))
        if there != digest:
            raise ObjectConflict(f"{self.url(key)}: holds sha256 {there}, refused to write sha256 {digest}")
        return Put.ALREADY

    def put_hint(self, key: str, body: bytes) -> None:
        """Overwrite a hint. Nothing may depend on it being right."""
        try:
            self._retried(
                lambda: self._client.put_object(
                    Bucket=self.address.bucket, Key=key, Body=body, ChecksumSHA256=_checksum(sha256(body))
                ),
                _nothing_landed,
            )
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
            raise self._error("write", key, error) from error

    def _create(self, key: str, body: bytes | IO[bytes], digest: str | None = None) -> bool:
        """True: ours is there. False: something was there already (perhaps ours, after a lost answer).

        digest: sha256 of a file's bytes; the store refuses what does not arrive so.
        """
        if isinstance(body, bytes):
            digest = sha256(body)
        checksum: Any = {"ChecksumSHA256": _checksum(digest)} if digest else {}

        def attempt() -> bool:
            if not isinstance(body, bytes):
                body.seek(0)
            try:
                self._client.put_object(Bucket=self.address.bucket, Key=key, Body=body, IfNoneMatch="*", **checksum)
            except botocore.exceptions.ClientError as error:
                if _status(error) == 412:
                    return False
                raise
            return True

        try:
            return self._retried(attempt, _nothing_landed)
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
            raise self._error("write", key, error) from error

    # -- reading ------------------------------------------------------------------------------------------

    def get(self, key: str, digest: str | None = None) -> bytes:
        """The object's bytes. Raises ObjectMissing; ObjectCorrupt when `digest` (sha256) does not match."""
        body = self._whole(lambda: b"".join(self._chunks(key)))
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

        def fetch() -> str:
            with part.open("wb") as file:
                return self._hash(key, file)

        try:
            found = self._whole(fetch)
            if found != digest:
                raise ObjectCorrupt(f"{self.url(key)}: sha256 {found}, expected {digest}")
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
        try:
            for page in self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.address.bucket, Prefix=prefix, Delimiter="/"
            ):
                names += [p["Prefix"][len(prefix) :].rstrip("/") for p in page.get("CommonPrefixes", [])]
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
            raise self._error("list", prefix, error) from error
        return sorted(names)

    def _chunks(self, key: str) -> Iterator[bytes]:
        """One pass over the object. Raises ObjectMissing; BrokenRead when it must be begun again."""
        try:
            answer = self._client.get_object(Bucket=self.address.bucket, Key=key, ChecksumMode="ENABLED")
        except botocore.exceptions.ClientError as error:
            if _code(error) in {"NoSuchKey", "404"} or _status(error) == 404:
                raise ObjectMissing(f"{self.url(key)}: no such object") from error
            raise self._error("read", key, error) from error
        except botocore.exceptions.BotoCoreError as error:
            raise self._error("read", key, error) from error
        except urllib3.exceptions.HTTPError as error:  # botocore lets it through when a 404's own body breaks off
            raise BrokenRead(str(self._error("read", key, error))) from error
        try:
            yield from answer["Body"].iter_chunks(1 << 20)
        except botocore.exceptions.BotoCoreError as error:  # botocore retries an answer's head, never its body
            raise BrokenRead(str(self._error("read", key, error))) from error

    def _hash(self, key: str, copy: IO[bytes] | None = None) -> str:
        hasher = hashlib.sha256()
        for chunk in self._chunks(key):
            hasher.update(chunk)
            if copy is not None:
                copy.write(chunk)
        return hasher.hexdigest()

    def _whole(self, read: Callable[[], T]) -> T:
        """`read` begun anew while the body breaks on its way."""
        return self._retried(read, lambda error: isinstance(error, BrokenRead))

    def _retried(self, call: Callable[[], T], passing: Callable[[BaseException], bool]) -> T:
        return Retrying(
            retry=retry_if_exception(passing),
            stop=stop_after_attempt(self.address.attempts),
            wait=wait_random_exponential(multiplier=0.1, max=2),
            reraise=True,
        )(call)

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
        try:
            self._client.delete_object(Bucket=self.address.bucket, Key=key)
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
            raise self._error("delete", key, error) from error
        if not first or second or held != b"first":
            raise UnsafeStore(
                f"{self.url('')}: a conditional PutObject (If-None-Match: *) replaced an existing object; "
                "Roadstead's commits are not safe there: use a store that honours it (AWS S3, SeaweedFS >= 4.48)"
            )

    def url(self, key: str) -> str:
        return f"s3://{self.address.bucket}/{key}"

    def _error(self, verb: str, key: str, error: Exception) -> StoreError:
        where = self.address.endpoint_url or "AWS"
        remedy = _REMEDIES.get(_code(error), "")
        if _status(error) == 507:  # stores spell the code in their own ways
            remedy = _REMEDIES["InsufficientStorage"]
        elif isinstance(error, botocore.exceptions.HTTPClientError | urllib3.exceptions.HTTPError):
            remedy = "the store does not answer: is it up, and reachable from here?"
        return StoreError(f"{self.url(key)} at {where}: can't {verb}: {error}{'; ' if remedy else ''}{remedy}")
