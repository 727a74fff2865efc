"""Kafka's protocol: requests, record batches and error codes. Nothing here does I/O."""
