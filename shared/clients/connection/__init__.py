"""The only package that imports aiokafka: sockets, metadata, wire structs, record batches, and the error table."""

from penstock.shared.clients.connection import wire, wire_groups
from penstock.shared.clients.connection.client import UNREACHED_LOG_MS, Connection, default_client_id, translated
from penstock.shared.clients.connection.completed_fetch import CompletedFetch, compile_decoding
from penstock.shared.clients.connection.errors import error_for_code, name_of, translate
from penstock.shared.clients.connection.fetch import NO_EPOCH, FetchedPartition, FetchRequest, FetchResponse
from penstock.shared.clients.connection.offset_lookups import by_leader, list_offsets
from penstock.shared.clients.connection.produce import ProduceAnswer, ProduceResponse
from penstock.shared.clients.connection.record_batches import (
    COMPRESSION,
    BatchRecord,
    Compression,
    SealedBatch,
    batch_records,
    compression_of,
    crc32c,
    new_batch_builder,
    produce_request,
    read_batches,
    record_size,
    seal_batch,
)
from penstock.shared.clients.connection.wire_admin import CONSUMER_GROUP_DESCRIBE
from penstock.shared.clients.connection.wire_types import NO_UUID, decode_assignment

__all__ = [
    "COMPRESSION",
    "CONSUMER_GROUP_DESCRIBE",
    "NO_EPOCH",
    "NO_UUID",
    "UNREACHED_LOG_MS",
    "BatchRecord",
    "CompletedFetch",
    "Compression",
    "Connection",
    "FetchRequest",
    "FetchResponse",
    "FetchedPartition",
    "ProduceAnswer",
    "ProduceResponse",
    "SealedBatch",
    "batch_records",
    "by_leader",
    "compile_decoding",
    "compression_of",
    "crc32c",
    "decode_assignment",
    "default_client_id",
    "error_for_code",
    "list_offsets",
    "name_of",
    "new_batch_builder",
    "produce_request",
    "read_batches",
    "record_size",
    "seal_batch",
    "translate",
    "translated",
    "wire",
    "wire_groups",
]
