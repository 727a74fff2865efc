"""What is read of a Delta table's log without a query is what Delta's own commands say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.services.spark import delta_log, tables


def test_the_log_says_what_delta_says(spark: Any, tmp_path: Path) -> None:
    """Versions newest first with operation, parameters, metrics and note, as far back as asked for and as the log goes.

    One that went back to a time is asked of Delta, which alone knows which version that was.
    """
    path, log = str(tmp_path / "table"), tmp_path / "table" / "_delta_log"
    spark.range(3).coalesce(1).write.format("delta").option("userMetadata", '{"n": 0}').save(path)

    def commit(number: int, operation: str, **parameters: str | None) -> None:
        said = {"timestamp": number, "operation": operation, "operationParameters": parameters}
        (log / f"{number:020}.json").write_text(json.dumps({"commitInfo": said}))

    def of(row: Any) -> tuple[Any, ...]:
        parameters = {name: text for name, text in row.operationParameters.items() if text is not None}
        return (row.version, row.operation, parameters, row.operationMetrics, row.userMetadata)

    commit(1, "RESTORE", version="0", timestamp=None)
    commit(2, "OPTIMIZE", predicate="[]")
    told = spark.sql(f"DESCRIBE HISTORY {tables.delta(path)}").collect()
    found = tables.history(spark, path)
    assert [*map(of, found)] == [(*of(row)[:3], row.operationMetrics or None, row.userMetadata) for row in told]
    assert [row.operation for row in found] == ["OPTIMIZE", "RESTORE", "WRITE"]
    assert (found[-1].userMetadata, found[-1].operationMetrics["numOutputRows"]) == ('{"n": 0}', "3")
    assert (delta_log.newest_version(spark, path), delta_log.files(spark, path)) == (2, 1)
    assert delta_log.is_near(spark, path)
    assert [row.version for row in tables.history(spark, path, 2)] == [2, 1]
    commit(3, "RESTORE", version=None, timestamp="2026-11-22 18:00:00")
    assert [row.timestamp is not None for row in tables.history(spark, path)] == [True] * 4
    reading = delta_log.commits(spark, path)
    assert next(reading).version == 3
    (log / f"{0:020}.json").unlink()  # as the log's retention does
    assert [row.version for row in reading] == [2, 1]
