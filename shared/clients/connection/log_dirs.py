"""DescribeLogDirs: the sizes of partitions on the brokers' disks. No client needs it, so it is not in `wire`."""

from __future__ import annotations

from aiokafka.protocol.types import Array, Boolean, Int32, Int64

from penstock.shared.clients.connection.wire import ERROR, THROTTLE
from penstock.shared.clients.connection.wire_types import TEXT, Api

DESCRIBE_LOG_DIRS = Api(
    "DescribeLogDirs",
    35,
    1,
    (("topics", Array(("name", TEXT), ("partitions", Array(Int32)))),),
    (
        THROTTLE,
        (
            "log_dirs",
            Array(
                ERROR,
                ("log_dir", TEXT),
                (
                    "topics",
                    Array(
                        ("name", TEXT),
                        (
                            "partitions",
                            Array(("partition", Int32), ("size", Int64), ("offset_lag", Int64), ("is_future", Boolean)),
                        ),
                    ),
                ),
            ),
        ),
    ),
)
