"""`penstock admin`: the admin service as a process."""

from __future__ import annotations

from penstock.services import daemon
from penstock.services.admin.daemon import AdminDaemon
from penstock.services.admin.settings import AdminServiceSettings


def main(arguments: list[str]) -> int:
    """Run `penstock admin` until SIGTERM. Returns the exit status: 2 for an invalid setting."""
    return daemon.serve("penstock admin", AdminServiceSettings, AdminDaemon, arguments)
