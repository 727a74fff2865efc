"""The connectors that are part of Penstock."""
