"""Handles records of one partition in parallel, as Confluent's parallel consumer does. Order is kept by key, and
records may finish out of order.

The handler runner of `penstock consumer` and the replay of dead letters use it.
"""
