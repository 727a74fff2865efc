"""The producer's settings, with the Java producer's names and defaults."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.log import get_logger
from penstock.shared.common.settings import KafkaSettings, PositiveMs, Section

log = get_logger(__name__)

IN_FLIGHT_MAX_FOR_IDEMPOTENCE = 5
"""The broker remembers so many batches of an idempotent producer in a partition, to detect duplicates (KAFKA-5494)."""


def _parse_acks(value: object) -> object:
    return "all" if value in (-1, "-1") else int(value) if value in ("0", "1") else value


class ProducerSettings(Section):
    """Settings for batching, sending and retrying records, and for giving them up."""

    acks: Annotated[Literal["all", 1, 0], BeforeValidator(_parse_acks)] = "all"
    enable_idempotence: bool = True
    linger_ms: int = Field(default=5, ge=0)
    batch_size: int = Field(default=16_384, gt=0, description="bytes of one batch before compression")
    buffer_memory: int = Field(
        default=32 * 1024 * 1024,
        gt=0,
        description="bytes of records not yet acknowledged; at most half is for partitions without progress",
    )
    max_block_ms: int = Field(
        default=60_000,
        ge=0,
        description="for metadata and buffer memory together; also for each request to a coordinator",
    )
    delivery_timeout_ms: PositiveMs = Field(
        default=120_000, description="from the creation of a record's batch to its acknowledgement"
    )
    max_request_size: int = Field(default=1024 * 1024, gt=0, description="bytes")
    compression_type: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    compression_gzip_level: int = Field(default=-1, ge=-1, le=9, description="1 to 9; -1: zlib's default")
    compression_lz4_level: int = Field(default=9, ge=1, le=17)
    compression_zstd_level: int = Field(default=3, ge=-131_072, le=22)
    transactional_id: str | None = Field(default=None, min_length=1)
    transaction_timeout_ms: PositiveMs = 60_000
    max_in_flight_requests_per_connection: int = Field(
        default=5,
        gt=0,
        description="without idempotence, a retry may change the order of a partition if this is above 1",
    )
    partitioner_ignore_keys: bool = Field(default=False, description="treat records with a key like those without one")
    partitioner_adaptive_partitioning_enable: bool = Field(
        default=True, description="send more records without a key to partitions with shorter queues"
    )
    partitioner_availability_timeout_ms: int = Field(
        default=0, ge=0, description="skip partitions whose due batch has waited for its broker for longer; 0: never"
    )
    retries: int = Field(default=2**31 - 1, ge=0, description="bounded by delivery_timeout_ms in any case")
    retry_backoff_max_ms: PositiveMs = 1_000
    metadata_max_idle_ms: int = Field(
        default=300_000, ge=5_000, description="a topic that is not sent to for longer is left out of the metadata"
    )
    metrics_sample_window_ms: PositiveMs = 30_000
    metrics_num_samples: int = Field(default=2, ge=1, description="windows that rates, averages and maxima cover")

    @field_validator("compression_gzip_level")
    @classmethod
    def _is_a_gzip_level(cls, level: int) -> int:
        if level == 0:
            raise ValueError("0 would not compress; leave compression_type=none")
        return level

    @property
    def compression_level(self) -> int | None:
        """The level of `compression_type`, None if it has no levels."""
        levels = {"gzip": self.compression_gzip_level, "lz4": self.compression_lz4_level}
        return {**levels, "zstd": self.compression_zstd_level}.get(self.compression_type)

    @model_validator(mode="after")
    def _idempotence_is_possible(self) -> Self:
        in_flight = self.max_in_flight_requests_per_connection
        conflicts = [
            reason
            for reason, holds in (
                (f"acks={self.acks} (needs all)", self.acks != "all"),
                ("retries=0 (needs at least 1)", self.retries == 0),
                (
                    f"max_in_flight_requests_per_connection={in_flight} (needs at most 5)",
                    in_flight > IN_FLIGHT_MAX_FOR_IDEMPOTENCE,
                ),
            )
            if holds
        ]
        # There are four cases, as in Java's `ProducerConfig`: a default gives way, what was set explicitly does not.
        # 1. Idempotence is on, and nothing contradicts it.
        if not conflicts and self.enable_idempotence:
            return self
        # 2. A transaction needs sequence numbers (KIP-98).
        if self.transactional_id is not None:
            raise ValueError(
                f"transactional_id needs idempotence: {', '.join(conflicts) or 'enable_idempotence is switched off'}"
            )
        # 3. Idempotence was set explicitly.
        if self.enable_idempotence and "enable_idempotence" in self.model_fields_set:
            raise ValueError(f"enable_idempotence=true contradicts {', '.join(conflicts)}")
        # 4. Idempotence is the default. The model is frozen, hence `object.__setattr__`.
        if self.enable_idempotence:
            log.warning("idempotence is switched off", because=", ".join(conflicts))
            object.__setattr__(self, "enable_idempotence", False)
        return self


def with_timeouts_that_fit(kafka: KafkaSettings, settings: ProducerSettings) -> ProducerSettings:
    """Return the settings. If the default `delivery_timeout_ms` is too short, it is raised to linger_ms +
    request_timeout_ms.

    Raises ConfigError if it was set explicitly and is too short.
    """
    # A shorter timeout would fail a batch while its first request may still be answered (KIP-91).
    least = settings.linger_ms + kafka.request_timeout_ms
    if settings.delivery_timeout_ms >= least:
        return settings
    if "delivery_timeout_ms" in settings.model_fields_set:
        raise ConfigError(
            f"delivery_timeout_ms={settings.delivery_timeout_ms} is below linger_ms + request_timeout_ms = {least}"
        )
    log.warning("delivery_timeout_ms raised to linger_ms + request_timeout_ms", delivery_timeout_ms=least)
    return settings.model_copy(update={"delivery_timeout_ms": least})
