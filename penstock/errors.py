"""Every error that Penstock raises on purpose; the base says what to do, see `penstock.shared.common.errors`."""

from penstock.shared.common.errors import *  # noqa: F403 - all of them, under their own names
