"""Kafka Connect in Python: connectors under Kafka Connect's names, settings and guarantees.

Authors of connectors import `penstock.connect`. Most modules of this package define that API, and its folders hold the
runtime and the built-in connectors, converters and transforms.
"""
