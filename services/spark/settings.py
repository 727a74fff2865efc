"""Settings of the Spark jobs."""

from __future__ import annotations

import os

from pydantic import Field, field_validator

from penstock.services.compaction_settings import KafkaTimeoutMs, SparkSettings
from penstock.shared.common.lake.location import hadoop_uri, lake_root, require_location
from penstock.shared.common.settings import CommandSettings, KafkaSettings
from penstock.shared.common.topic_names import APPLICATION_ID, APPLICATION_ID_MAX, changelog_topic


class JobSettings(CommandSettings):
    """The settings that all Spark jobs share."""

    kafka: KafkaSettings = KafkaSettings()
    application: str = Field(
        pattern=APPLICATION_ID, max_length=APPLICATION_ID_MAX, description="the aggregator's application id"
    )
    lake: str = Field(min_length=1, description="folder or URI that holds the Delta tables of all applications")
    lake_options: dict[str, str] = Field(
        default={},
        description="object store options for the lake, as deltalake takes them; an audit and the after hook do not "
        "use them: they take only the AWS_… variables and spark.conf",
    )
    spark: SparkSettings = SparkSettings()
    kafka_timeout_ms: KafkaTimeoutMs = 60_000

    @field_validator("lake")
    @classmethod
    def _check_lake(cls, lake: str) -> str | None:
        return require_location(lake)

    @property
    def changelog_topic(self) -> str:
        return changelog_topic(self.application)

    @property
    def tables(self) -> str:
        """The folder of this application's tables for Spark: an absolute path, or a URI (`s3a` for S3)."""
        return f"{hadoop_uri(lake_root(self.lake))}/{self.application}"

    @property
    def folder(self) -> str:
        """The folder or URI of this application's tables."""
        return f"{lake_root(self.lake)}/{self.application}"

    @property
    def storage_options(self) -> dict[str, str]:
        """deltalake's storage options: the environment's AWS_… variables, overridden by `lake_options`."""
        # Of two names of one option, deltalake takes either at random.
        own = {_option(name) for name in self.lake_options}
        variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        return {name: value for name, value in variables.items() if _option(name) not in own} | self.lake_options

    @property
    def spark_uris(self) -> tuple[str, ...]:
        """The folders and files that Spark reads and writes, as it names them."""
        return (self.tables,)


def _option(name: str) -> str:
    """Return the option of S3 that a name stands for: `endpoint`, `aws_endpoint` and `AWS_ENDPOINT_URL` are one."""
    return name.lower().removeprefix("aws_").removesuffix("_url")
