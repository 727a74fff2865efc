"""A Connect worker's REST server: its listener, its advertised address and its credentials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.api.connect.routes import StartingApp
from penstock.services.connect.rest_server import guarded_rest_app, is_rest_open, rest_listener, worker_id_of
from penstock.services.connect.worker_command_line import read_command_line
from penstock.shared.common.errors import ConfigError

CONVERTERS = "key.converter=org.apache.kafka.connect.json.JsonConverter\n" + (
    "value.converter=org.apache.kafka.connect.json.JsonConverter\n"
)
DISTRIBUTED = CONVERTERS + "group.id=g\nconfig.storage.topic=c\noffset.storage.topic=o\nstatus.storage.topic=s\n"


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.properties"
    path.write_text(DISTRIBUTED + "listeners=http://127.0.0.1:18083\n")
    return path


def test_rest_listens_at_the_first_listener(worker: Path) -> None:
    """The REST API listens at the first listener, and other workers use the advertised address."""
    config = read_command_line("distributed", [str(worker)]).config
    http = rest_listener(config)
    assert (http.host, http.port) == ("127.0.0.1", 18083)
    assert worker_id_of(config, http, 18083) == "127.0.0.1:18083"
    flags = ["--rest.advertised.host.name=proxy", "--rest.advertised.port=80"]
    assert worker_id_of(read_command_line("distributed", [str(worker), *flags]).config, http, 18083) == "proxy:80"
    everywhere = read_command_line("distributed", [str(worker), "--listeners=http://:8083"]).config
    assert rest_listener(everywhere).port == 8083
    assert not worker_id_of(everywhere, rest_listener(everywhere), 8083).startswith("0.0.0.0")
    for wrong in ("https://:8443", "http://:port", "8083"):
        with pytest.raises(ConfigError, match="listeners"):
            rest_listener(read_command_line("distributed", [str(worker), f"--listeners={wrong}"]).config)


async def test_rest_requires_the_configured_credentials(worker: Path) -> None:
    """A request needs a configured token or user; without any, only requests to this machine's own names are served."""

    async def status(flags: list[str], url: str = "http://127.0.0.1/connectors", **options: Any) -> int:
        config = read_command_line("distributed", [str(worker), *flags]).config
        app = guarded_rest_app(StartingApp(), config, rest_listener(config))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            return (await client.get(url, **options)).status_code

    flags = ["--rest.auth.token=0123456789abcdef", "--rest.auth.users=ann:fedcba9876543210"]
    assert await status(flags) == 401
    assert await status(flags, headers={"Authorization": "Bearer 0123456789abcdef"}) == 503
    assert await status(flags, auth=("ann", "fedcba9876543210")) == 503
    assert await status(flags, auth=("ann", "0123456789abcdef")) == 401
    assert await status(flags, "http://worker.example/health") == 503
    assert (await status([]), await status([], "http://elsewhere.example/connectors")) == (503, 421)
    for wrong in ("--rest.auth.users=ann", "--rest.auth.token=short"):
        config = read_command_line("distributed", [str(worker), wrong]).config
        with pytest.raises(ConfigError, match=r"rest\.auth"):
            guarded_rest_app(StartingApp(), config, rest_listener(config))


def test_a_user_has_one_password(worker: Path) -> None:
    """A user that is named twice is a ConfigError with the name and without a password."""
    flag = "--rest.auth.users=ann:0123456789abcdef,bob:abcdefabcdefabcd,ann:fedcba9876543210"
    config = read_command_line("distributed", [str(worker), flag]).config
    with pytest.raises(ConfigError, match="'ann'") as raised:
        guarded_rest_app(StartingApp(), config, rest_listener(config))
    assert "fedcba9876543210" not in str(raised.value)


def test_an_open_address_is_detected(worker: Path) -> None:
    """An address that other machines reach without authentication is detected."""

    def detected(*flags: str) -> bool:
        config = read_command_line("distributed", [str(worker), *flags]).config
        return is_rest_open(config, rest_listener(config))

    assert not detected()
    assert detected("--listeners=http://:8083")
    assert not detected("--listeners=http://:8083", "--rest.auth.token=0123456789abcdef")
