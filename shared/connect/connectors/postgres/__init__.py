"""The Postgres sink and source."""
