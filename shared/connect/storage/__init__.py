"""The stored state of a Connect cluster: configs, statuses and offsets, in three compacted topics or one process."""
