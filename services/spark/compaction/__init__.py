"""Compactions: the changelog, appended to the lake's tables."""
