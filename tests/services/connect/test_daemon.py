"""Errors that prevent a worker's start: the exit status, and the setting that the message names."""

from __future__ import annotations

import socket

import pytest

from penstock.services.connect.daemon import PORT_IN_USE, ConnectDaemon, StartFailed
from penstock.services.connect.worker_command_line import CommandLine
from penstock.services.exit_status import ExitStatus
from penstock.shared.common.settings import LogSettings
from penstock.shared.connect.runtime.worker_config import StandaloneConfig
from penstock.shared.testing.fake_broker import FakeCluster

CONVERTER = "org.apache.kafka.connect.json.JsonConverter"


async def failed_start(**settings: str) -> tuple[int, str]:
    """Return exit status and message of a worker that does not start. Names of settings have underscores for dots."""
    async with FakeCluster() as cluster:
        props = {
            "bootstrap.servers": cluster.bootstrap_servers,
            "key.converter": CONVERTER,
            "value.converter": CONVERTER,
            "offset.storage.file.filename": "unused",
            "listeners": "http://127.0.0.1:0",
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        daemon = ConnectDaemon(CommandLine("standalone", StandaloneConfig(props), {}, LogSettings()))
        try:
            with pytest.raises(StartFailed) as error:
                await daemon.startup()
        finally:
            await daemon.shutdown()
        return daemon.exit_status, str(error.value)


async def test_an_unknown_config_provider_is_an_invalid_setting() -> None:
    """The error for an unknown config provider names the setting and the known providers."""
    status, reason = await failed_start(config_providers="env,vault")
    assert status == ExitStatus.WRONG_SETTING
    assert reason == "config.providers.vault.class: there is no config provider vault, only env, file, dir"


async def test_a_port_in_use_is_reported_for_listeners() -> None:
    """A port in use is reported for `listeners`, because a worker's properties have no http.port."""
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        status, reason = await failed_start(listeners=f"http://127.0.0.1:{port}")
    assert status == PORT_IN_USE
    assert reason.startswith(f"listeners: port {port} on 127.0.0.1 is in use")
