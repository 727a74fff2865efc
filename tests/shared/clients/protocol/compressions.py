"""The compressions of record batches, each at its default level."""

from __future__ import annotations

from typing import get_args

from penstock.shared.clients.producer import ProducerSettings
from penstock.shared.clients.protocol.record_batches import compression_of

COMPRESSION = {
    name: compression_of(name, ProducerSettings(compression_type=name).compression_level)
    for name in get_args(ProducerSettings.model_fields["compression_type"].annotation)
}
