"""Schedules the records of each partition to be handled in parallel, as Confluent's parallel consumer does.

`ordering` sets whether order is kept by key, by partition or not at all. Records may finish out of order.

The handler runner of `penstock consumer` and the replay of dead letters use it.
"""
