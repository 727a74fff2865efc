"""The audit: a store's windows, compared with what Spark makes of the source topic."""
