"""`penstock admin`: the admin service as a process."""

from __future__ import annotations

from penstock.services import service_lifecycle
from penstock.services.admin.daemon import AdminDaemon
from penstock.services.admin.settings import AdminServiceSettings


def main(arguments: list[str]) -> int:
    """Run `penstock admin` until SIGTERM or SIGINT. The exit status is 2 if a setting is invalid."""
    return service_lifecycle.serve("penstock admin", AdminServiceSettings, AdminDaemon, arguments)
