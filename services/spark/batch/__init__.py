"""Batches: a topology processes the records that its source topics, or files, hold now."""
