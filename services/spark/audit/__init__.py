"""The audit compares a store's windows with the windows that Spark computes from the source topic."""
