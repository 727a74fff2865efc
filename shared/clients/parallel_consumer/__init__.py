"""Parallel handling of a partition's records, as in Confluent's parallel consumer: order by key, progress with gaps.

The handler runner of `penstock consumer` and the replay of dead letters use it.
"""
