"""Replays recorded cases of Kafka Streams and compares the output; see `penstock.shared.testing.oracle`.

python -m penstock.testing.oracle [--batch N] [--store in_memory|rocksdb] FILE…
"""

import sys as _sys

from penstock.shared.testing.oracle import main

__all__ = ["main"]

if __name__ == "__main__":
    _sys.exit(main(_sys.argv[1:]))
