"""Compactions append the changelog to the lake's Delta tables."""
