"""Settings of `penstock audit`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from penstock.services.spark.settings import JobSettings
from penstock.shared.common.settings import KafkaSettings

# Keys are hashed into this many buckets. A sample has its share of the buckets.
SAMPLE_PARTS = 1_000_000


class AuditSettings(JobSettings):
    """`penstock audit`: compare a store's windows with Spark's own over the source topic."""

    store: str | None = Field(default=None, description="the store to audit; default: the only one that has windows")
    conservation_only: bool = Field(
        default=False,
        description="do not recompute which windows were closed when, for a store whose grace has changed",
    )
    expect_records: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="number of records that the source must hold"
    )
    sample: Annotated[float, Field(ge=1 / SAMPLE_PARTS, le=1)] = Field(
        default=1.0, description="share of the keys that are compared; all records are read, since they move time"
    )
    differences_max: Annotated[int, Field(ge=0)] = Field(
        default=20, description="number of differences of each check that are listed"
    )
    json_line: bool = Field(default=False, description="print one JSON object as the last line; --json is the same")

    @field_validator("kafka")
    @classmethod
    def _java_can_log_in(cls, kafka: KafkaSettings) -> KafkaSettings:
        if kafka.sasl_mechanism == "OAUTHBEARER":
            raise ValueError(
                "sasl_mechanism=OAUTHBEARER: an audit reads topics with Kafka's Java client, which cannot call the "
                "Python function that returns the tokens; use PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or certificates"
            )
        return kafka
