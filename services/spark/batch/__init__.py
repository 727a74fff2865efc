"""Batches: a topology over what the source topics, or files, hold now."""
