"""Jobs whose Kafka does not respond."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from penstock.services.local.topologies import sessions
from penstock.services.spark.audit.audit import run_audit
from penstock.services.spark.audit.settings import AuditSettings
from penstock.services.spark.compaction.compact import CompactionJob
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.common.errors import BrokerNotAvailable
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.format import Progress
from tests import lake_tables


def compact(spark: Any, **settings: Any) -> None:
    CompactionJob(spark, CompactSettings(**settings), print).run()


def audit(spark: Any, **settings: Any) -> None:
    run_audit(spark, AuditSettings(**settings), print)


@pytest.mark.parametrize(("job", "port"), [(compact, 7), (audit, 9)])
def test_an_unreachable_kafka_is_logged_early(spark: Any, tmp_path: Path, job: Callable[..., None], port: int) -> None:
    """Each job logs a warning with the address that it cannot reach, and fails later."""
    schemas = sessions().of_application("app").schemas()
    body = msgspec.json.encode(Progress("app", "exactly_once", {}, {}, {}, {}, tuple(schemas), 0))
    lake_tables.write_state(tmp_path, "app", schemas, [lake_tables.progress(0, 0, body)])
    # The jobs' addresses differ, since a process repeats the warning only after a while.
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}", request_timeout_ms=4_000)
    with capture_logs() as logged, pytest.raises(BrokerNotAvailable, match=kafka.bootstrap_servers):
        job(spark, application="app", lake=str(tmp_path), kafka=kafka)
    assert logged[0]["log_level"] == "warning"
    assert kafka.bootstrap_servers in str(logged[0])
