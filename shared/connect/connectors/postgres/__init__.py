"""Postgres, as a sink and as a source."""
