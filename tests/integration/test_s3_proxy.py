"""The fault-injecting proxy itself: without a fault it is not there, and each fault does what it says."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Iterator
from typing import Any

import boto3
import botocore.config
import botocore.exceptions
import pytest

from roadstead.storage.objects import ObjectStore
from tests.support.s3_proxy import Fault, Moment, S3Proxy, proxy_in_thread
from tests.support.store_contract import StoreContract

BODY = bytes(range(256)) * 1024


@pytest.fixture
def proxy(store: ObjectStore) -> Iterator[S3Proxy]:
    assert store.address.endpoint_url
    with proxy_in_thread(store.address.endpoint_url, stall_s=2.0) as proxy:
        yield proxy


@pytest.fixture
def key() -> str:
    return f"proxy/{uuid.uuid4().hex}/object"


def client(proxy: S3Proxy, store: ObjectStore) -> Any:
    """A client that never retries: what it sees is what the proxy did."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=proxy.url,
        region_name="us-east-1",
        aws_access_key_id=store.address.access_key,
        aws_secret_access_key=store.address.secret_key,
        config=botocore.config.Config(
            retries={"total_max_attempts": 1},
            read_timeout=1,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
        ),
    )


class TestWithoutFaults(StoreContract):
    """Signatures included: the server behind enforces them."""

    @pytest.fixture
    def store(self, store: ObjectStore, proxy: S3Proxy) -> ObjectStore:
        return ObjectStore(dataclasses.replace(store.address, endpoint_url=proxy.url))

    def test_the_probe_passes(self, store: ObjectStore, proxy: S3Proxy) -> None:
        store.probe()
        assert [c.status for c in proxy.crossed("PUT")] == [200, 412]

    def test_keys_with_odd_characters_keep_their_signature(self, store: ObjectStore, key: str) -> None:
        odd = f"{key} +%&=ü/step=00000001"
        store.put_once(odd, b"x")
        assert store.get(odd) == b"x" and list(store.keys(key)) == [odd]


@pytest.mark.parametrize(
    "fault", [f for f in Fault if isinstance(f.value[0], int) and f.value[0] >= 400], ids=lambda f: f.name
)
def test_an_answered_fault_reaches_the_client_and_not_the_server(
    fault: Fault, proxy: S3Proxy, store: ObjectStore, key: str
) -> None:
    proxy.inject(fault, method="PUT", key=key, times=1)
    with pytest.raises(botocore.exceptions.ClientError) as error:
        client(proxy, store).put_object(Bucket="roadstead", Key=key, Body=BODY)
    assert error.value.response["Error"]["Code"] == fault.value[1]
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == fault.value[0]
    assert not store.exists(key)
    client(proxy, store).put_object(Bucket="roadstead", Key=key, Body=BODY)
    assert store.get(key) == BODY, "the fault was asked for once"


@pytest.mark.parametrize(
    ("fault", "error", "landed"),
    [
        (Fault.RESET_BEFORE, botocore.exceptions.ConnectionClosedError, None),
        (Fault.RESET_AFTER, botocore.exceptions.ConnectionClosedError, BODY),
        (Fault.TRUNCATED_UPLOAD, botocore.exceptions.ConnectionClosedError, None),
        (Fault.STALL, botocore.exceptions.ReadTimeoutError, None),
    ],
    ids=lambda v: v.name if isinstance(v, Fault) else "",
)
def test_a_broken_put(
    fault: Fault, error: type[Exception], landed: bytes | None, proxy: S3Proxy, store: ObjectStore, key: str
) -> None:
    proxy.inject(fault, method="PUT")
    with pytest.raises(error):
        client(proxy, store).put_object(Bucket="roadstead", Key=key, Body=BODY)
    assert store.find(key) == landed
    assert [c.fault for c in proxy.crossed("PUT")] == [fault]


def test_a_short_upload_lands_short_when_nothing_checks_it(proxy: S3Proxy, store: ObjectStore, key: str) -> None:
    proxy.inject(Fault.SHORT_UPLOAD, method="PUT")
    client(proxy, store).put_object(Bucket="roadstead", Key=key, Body=BODY)
    assert store.get(key) == BODY[: len(BODY) // 2]


def test_a_truncated_read_breaks_and_a_short_one_does_not(proxy: S3Proxy, store: ObjectStore, key: str) -> None:
    store.put_once(key, BODY)
    proxy.inject(Fault.TRUNCATED_READ, method="GET", times=1)
    proxy.inject(Fault.SHORT_READ, method="GET", times=1)
    s3 = client(proxy, store)
    answer = s3.get_object(Bucket="roadstead", Key=key)
    with pytest.raises((botocore.exceptions.IncompleteReadError, botocore.exceptions.ResponseStreamingError)):
        answer["Body"].read()
    assert s3.get_object(Bucket="roadstead", Key=key)["Body"].read() == BODY[: len(BODY) // 2]
    assert s3.get_object(Bucket="roadstead", Key=key)["Body"].read() == BODY


def test_a_late_answer_is_the_right_one(proxy: S3Proxy, store: ObjectStore, key: str) -> None:
    proxy.inject(Fault.DELAY)
    client(proxy, store).put_object(Bucket="roadstead", Key=key, Body=BODY)
    assert store.get(key) == BODY and proxy.crossed("PUT")[0].fault is Fault.DELAY


def test_a_stale_listing_lacks_what_was_put_after_it_went_stale(proxy: S3Proxy, store: ObjectStore, key: str) -> None:
    through = ObjectStore(dataclasses.replace(store.address, endpoint_url=proxy.url))
    through.put_once(f"{key}/v=1/x", b"x")
    proxy.inject(Fault.STALE_LIST, method="LIST")
    through.put_once(f"{key}/v=2/x", b"x")
    assert list(through.keys(f"{key}/")) == [f"{key}/v=1/x"] and through.folders(f"{key}/") == ["v=1"]
    assert through.get(f"{key}/v=2/x") == b"x", "only listings are stale"
    proxy.heal()
    assert through.folders(f"{key}/") == ["v=1", "v=2"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_hook_sees_both_moments_and_can_drop_the_request(
    moment: Moment, proxy: S3Proxy, store: ObjectStore, key: str
) -> None:
    seen: list[tuple[Moment, str, str]] = []

    def hook(when: Moment, method: str, where: str) -> bool:
        seen.append((when, method, where))
        return when == moment

    proxy.on_request = hook
    with pytest.raises(botocore.exceptions.ConnectionClosedError):
        client(proxy, store).put_object(Bucket="roadstead", Key=key, Body=BODY)
    assert store.exists(key) == (moment == "after")
    assert seen == [("before", "PUT", key), ("after", "PUT", key)][: 1 if moment == "before" else 2]


async def test_it_also_runs_in_the_loop_of_an_asynchronous_test(store: ObjectStore, key: str) -> None:
    calls: list[Moment] = []

    async def hook(when: Moment, method: str, where: str) -> None:
        calls.append(when)

    assert store.address.endpoint_url
    async with S3Proxy(store.address.endpoint_url, on_request=hook) as proxy:
        through = ObjectStore(dataclasses.replace(store.address, endpoint_url=proxy.url))
        await asyncio.to_thread(through.put_once, key, b"x")
    assert store.get(key) == b"x" and calls == ["before", "after"]


def test_the_same_seed_breaks_the_same_requests(store: ObjectStore, key: str) -> None:
    def run() -> list[bool]:
        assert store.address.endpoint_url
        with proxy_in_thread(store.address.endpoint_url, seed=7) as proxy:
            proxy.inject(Fault.SLOW_DOWN, share=0.5)
            s3 = client(proxy, store)
            for i in range(20):
                with contextlib.suppress(botocore.exceptions.ClientError):
                    s3.put_object(Bucket="roadstead", Key=f"{key}{i}", Body=b"x")
            return [c.fault is not None for c in proxy.crossings]

    first = run()
    assert first == run() and 4 < sum(first) < 16
