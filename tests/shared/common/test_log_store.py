"""When two jobs of one application are kept apart."""

from __future__ import annotations

from penstock.shared.common.log_store import LOG_STORE, unarbitrated


def test_a_lake_on_s3_without_a_log_store_is_warned_of() -> None:
    """With the setting's name, however S3 is spelled; a folder and another object store need none."""
    for lake in ("s3a://lake/visits", "S3://lake/visits"):
        said = unarbitrated(lake, {"spark.x": "y"}, "spark.conf")
        assert said is not None
        assert said.startswith(f"{lake}: ")
        assert "set spark.conf spark.delta.logStore.s3a.impl" in said
        assert unarbitrated(lake, {LOG_STORE: "io.delta.storage.S3DynamoDBLogStore"}, "spark.conf") is None
    assert unarbitrated("/lake/s3/visits", {}, "spark.conf") is None
    assert unarbitrated("gs://lake/visits", {}, "spark.conf") is None
