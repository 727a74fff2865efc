"""The compressions of record batches, each at its default level."""

from __future__ import annotations

from penstock.shared.clients.protocol.record_batches import compression_of

COMPRESSION = {name: compression_of(name) for name in ("none", "gzip", "snappy", "lz4", "zstd")}
