"""`penstock streams reset` with a lake on S3; the server is moto's, which implements S3's protocol."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.services.aggregator.streams_command import main
from penstock.shared.common.lake import state_snapshot
from penstock.shared.common.lake.append_once import append_once
from penstock.shared.testing.fake_broker import FakeCluster
from tests.integration.s3_server import MOTO

pytestmark = pytest.mark.skipif(MOTO is None, reason="needs moto_server on the PATH: pip install 'moto[server]'")
AWS = {"AWS_ACCESS_KEY_ID": "ann", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


async def test_a_snapshot_on_s3(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run lists the snapshot, an unreachable bucket is an error that deletes nothing, and `--execute` deletes
    only the application's objects, even after a partial removal.
    """
    monkeypatch.chdir(tmp_path)
    options = {**AWS, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    boto3: Any = pytest.importorskip("boto3")
    s3 = boto3.client("s3", endpoint_url=endpoint, region_name=AWS["AWS_REGION"])

    async def reset(cluster: FakeCluster, where: str, *more: str) -> tuple[int, str, str]:
        monkeypatch.setenv("PENSTOCK_STREAMS__LAKE", where)
        monkeypatch.setenv("PENSTOCK_STREAMS__LAKE_OPTIONS", json.dumps(options))
        arguments = ["reset", "--application-id", "app", "--bootstrap-servers", cluster.bootstrap_servers, *more]
        status = await asyncio.to_thread(main, arguments)
        return status, *capsys.readouterr()

    def keys() -> set[str]:
        return {one["Key"] for one in s3.list_objects_v2(Bucket="lake").get("Contents", [])}

    for table in ("app/state", "app/closed/visits", "app-eu/state"):
        append_once(f"s3a://lake/penstock/{table}", pa.table({"n": [1]}), {"w": (None, 1)}, options)
    # Keys that begin with the application's name, and Hadoop's objects for folders.
    for key in ("app", "app/", "app/state/", "apple/state/_delta_log/0.json"):
        s3.put_object(Bucket="lake", Key=f"penstock/{key}", Body=b"")
    before, kept = keys(), {"penstock/app", "penstock/app/", "penstock/app/state/"}
    others = {key for key in before if not key.startswith("penstock/app/")}
    async with FakeCluster() as cluster:
        for scheme in ("s3", "s3a"):
            status, out, err = await reset(cluster, f"{scheme}://lake/penstock")
            assert (status, err) == (0, "")
            first, _, last = out.splitlines()
            assert first.startswith(f"snapshot {scheme}://lake/penstock/app: closed/visits (2 files, ")
            assert last == "nothing was changed: add --execute to apply the change"
        status, _, err = await reset(cluster, "s3://missing/penstock", "--execute")
        assert status == 1
        assert err.startswith("penstock streams: LakeNotRemoved: s3://missing/penstock/app cannot be listed: ")
        assert len(err.splitlines()) == 1
        assert keys() == before
        s3.delete_object(Bucket="lake", Key="penstock/app/state/_delta_log/00000000000000000000.json")
        status, out, err = await reset(cluster, "s3a://lake/penstock/", "--execute")
        assert (status, err, out.splitlines()[-1]) == (0, "", "done")
        assert keys() == others | (before & kept)
        assert state_snapshot.read_snapshot("s3://lake/penstock", "app", [0], options) is None
        status, out, err = await reset(cluster, "s3://lake/penstock", "--execute")
        assert (status, err, out) == (0, "", "application app: there is nothing to delete\n")
