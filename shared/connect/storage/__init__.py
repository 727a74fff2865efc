"""What a Connect cluster remembers: configs, statuses and offsets, in three compacted topics or one process."""
