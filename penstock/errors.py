"""Every error that Penstock raises on purpose; the base says what to do, see `shared.common.errors`."""

from shared.common.errors import *  # noqa: F403 - all of them, under their own names
