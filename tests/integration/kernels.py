"""Loads all kernels when it is imported."""

from __future__ import annotations

from penstock.shared.streams.compile_kernels import compile_kernels

compile_kernels()
