"""The errors that keep a worker from starting: the exit status, and the property that the one line names."""

from __future__ import annotations

import socket

import pytest

from penstock.services.connect.daemon import PORT_TAKEN, WRONG_SETTING, ConnectDaemon, StartFailed
from penstock.services.connect.settings import CommandLine
from penstock.shared.common.settings import LogSettings
from penstock.shared.connect.herder.settings import StandaloneConfig
from penstock.shared.testing.fake_broker import FakeCluster

CONVERTER = "org.apache.kafka.connect.json.JsonConverter"


async def refusal(**settings: str) -> tuple[int, str]:
    """Exit status and reason of a worker that does not start; settings with underscores for dots."""
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
            with pytest.raises(StartFailed) as refused:
                await daemon.startup()
        finally:
            await daemon.shutdown()
        return daemon.exit_status, str(refused.value)


async def test_an_unknown_config_provider_is_a_wrong_setting() -> None:
    """The line names the setting and the known providers."""
    status, reason = await refusal(config_providers="env,vault")
    assert status == WRONG_SETTING
    assert reason == "config.providers.vault.class: there is no config provider vault, only env, file, dir"


async def test_a_port_that_is_taken_is_the_listeners() -> None:
    """The line names `listeners`, because a worker's properties have no http.port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, reason = await refusal(listeners=f"http://127.0.0.1:{port}")
    assert status == PORT_TAKEN
    assert reason.startswith(f"listeners: port {port} on 127.0.0.1 is taken")
