"""Counts the retries that a task has left after temporary errors."""

from __future__ import annotations

from penstock.shared.common.errors import RetriableError
from penstock.shared.connect.errors import ConnectError


class Retries:
    """The number of retries that are left. A success restores the maximum."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most

    def __repr__(self) -> str:
        return f"<Retries {self._left} of {self._most}>"

    def succeeded(self) -> None:
        self._left = self._most

    def failed(self, message: str) -> Exception:
        """Return the error to raise: RetriableError while retries are left, then ConnectError."""
        if self._left <= 0:
            return ConnectError(f"still failing after {self._most} retries: {message}")
        self._left -= 1
        return RetriableError(message)
