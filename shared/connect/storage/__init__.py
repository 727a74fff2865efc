"""The stored state of Connect workers: configs, statuses and offsets, in compacted topics, in memory or in a file."""
