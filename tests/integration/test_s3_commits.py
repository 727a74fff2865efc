"""Two jobs that commit to a table on S3 at once, without Spark, against a server that speaks S3's protocol (moto's)."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from penstock.services.spark.compaction import delta_writer
from penstock.services.spark.compaction.delta_writer import CompactionConflict, DataFile, DeltaFiles
from penstock.shared.common.lake import delta_tables
from tests.integration.s3_server import MOTO, s3_server

pytestmark = pytest.mark.skipif(MOTO is None, reason="needs moto_server on the PATH: pip install 'moto[server]'")

SCHEMA = pa.schema({"partition": pa.int32(), "changelog_offset": pa.int64()})
URI = "s3://lake/penstock/app/closed/s"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The storage options of a new server with a bucket `lake`."""
    with s3_server(tmp_path_factory.mktemp("s3"), "lake") as url:
        keys = {"AWS_ACCESS_KEY_ID": "ann", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        yield {**keys, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}


def written(options: dict[str, str], offset: int) -> DataFile:
    row = pa.RecordBatch.from_pylist([{"partition": 0, "changelog_offset": offset}], SCHEMA)
    return DeltaFiles(URI, options, ["changelog_offset"]).write([row])


def test_the_second_of_two_commits_is_rejected(options: dict[str, str]) -> None:
    """Both were planned with the same version: one is committed completely, and no row of the other is visible."""
    table = delta_writer.ensure_table(None, URI, options, SCHEMA, ["changelog_offset"], is_partitioned=False)
    other = delta_tables.open_table(URI, options)
    assert other is not None
    assert delta_writer.commit(table, [written(options, 7)], [], {}) == 1
    with pytest.raises(CompactionConflict, match="version 1"):
        delta_writer.commit(other, [written(options, 7)], [], {})
    now = delta_tables.open_table(URI, options)
    assert now is not None
    assert delta_tables.rows(now, "SELECT changelog_offset FROM t") == [{"changelog_offset": 7}]
    with pytest.raises(CompactionConflict, match="at the same time"):
        delta_writer.ensure_table(None, URI, options, SCHEMA, ["changelog_offset"], is_partitioned=False)
