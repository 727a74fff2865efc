"""The runtime: workers and their tasks, error handling, conversion, metrics and configuration."""
