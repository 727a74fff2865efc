"""Settings of the admin service."""

from __future__ import annotations

import pytest

from penstock.services.admin.main import main
from penstock.services.admin.settings import AdminServiceSettings
from penstock.shared.common.errors import ConfigError


def load(*arguments: str, **environ: str) -> AdminServiceSettings:
    return AdminServiceSettings.load(arguments, environ=environ)


def test_services_are_addresses_by_name() -> None:
    """The services come from one variable each or from one JSON variable, and a trailing slash is removed."""
    settings = load(PENSTOCK_SERVICES__PRODUCER="http://producer:8080/", PENSTOCK_SERVICES__AGGREGATOR="https://a")
    assert settings.services == {"producer": "http://producer:8080", "aggregator": "https://a"}
    assert load(PENSTOCK_SERVICES='{"p": "http://p"}').services == {"p": "http://p"}


def test_a_line_end_after_an_address_is_removed() -> None:
    """A line end, as at the end of a file, does not become part of the address."""
    assert load(PENSTOCK_SERVICES__PRODUCER="http://producer:8080/\n").services == {"producer": "http://producer:8080"}


@pytest.mark.parametrize("url", ["producer:8080", "ftp://producer", "http://", "file:///etc/passwd", "http://a:8O83"])
def test_an_invalid_address_is_rejected(url: str) -> None:
    """An invalid address is a ConfigError that names the service."""
    with pytest.raises(ConfigError, match=r"services\.producer.*http"):
        load(PENSTOCK_SERVICES__PRODUCER=url)


def test_an_open_address_needs_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a token for an open address the service ends with status 2 and the setting's name."""
    with pytest.raises(SystemExit) as e:
        main(["--http.host", "0.0.0.0"])
    assert e.value.code == 2
    assert "auth_token" in capsys.readouterr().err
