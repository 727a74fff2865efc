"""Settings of the HTTP API."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from penstock.api.settings import Credential, GuardedSettings, IngestSettings, TopicSettings, check_secrets, is_loopback
from penstock.shared.common.errors import ConfigError


@pytest.mark.parametrize("pointer", ["carrier", "", "/a~2", "a/b"])
def test_an_invalid_pointer_is_an_error(pointer: str) -> None:
    """An invalid JSON pointer is a ConfigError."""
    with pytest.raises(ConfigError, match="JSON pointer"):
        TopicSettings(key=(pointer,))
    with pytest.raises(ConfigError, match="JSON pointer"):
        TopicSettings(time=pointer)


def test_a_topic_without_entry_has_the_default() -> None:
    """A topic without an entry has the default topic's settings."""
    settings = IngestSettings.model_validate({"topics": {"a": {"time": "/t"}}, "default_topic": {"allowed": False}})
    assert settings.for_topic("a").time == "/t"
    assert not settings.for_topic("b").allowed
    assert IngestSettings().for_topic("b") == TopicSettings()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost", "127.8.8.8"])
def test_a_loopback_address_needs_no_token(host: str) -> None:
    """A loopback address needs no token."""
    assert is_loopback(host)
    check_secrets(host, [], insecure_no_auth=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "kafka.example", "localhost.example", ""])
def test_any_other_address_needs_one(host: str) -> None:
    """Any other address needs a token, unless `insecure_no_auth` is set."""
    with pytest.raises(ConfigError, match=r"auth_token.*insecure_no_auth"):
        check_secrets(host, [], insecure_no_auth=False)
    check_secrets(host, [], insecure_no_auth=True)
    check_secrets(host, [SecretStr("x" * 16)], insecure_no_auth=False)


def test_a_short_token_is_an_error_that_hides_it() -> None:
    """A token of fewer than 16 characters is a ConfigError that does not contain it."""
    with pytest.raises(ConfigError, match="at least 16 characters") as e:
        check_secrets("127.0.0.1", [SecretStr("hunter2")], insecure_no_auth=False)
    assert "hunter2" not in str(e.value)


@pytest.mark.parametrize("secret", ["0123456789abcdef\n", " 0123456789abcdef", "0123456789abcdeé"])
def test_a_secret_that_no_header_can_have_is_an_error(secret: str) -> None:
    """A secret with a line end, a blank at an end, or a character beyond ASCII is a ConfigError that hides it."""
    with pytest.raises(ConfigError, match="printable ASCII") as e:
        check_secrets("127.0.0.1", [SecretStr(secret)], insecure_no_auth=False)
    assert "0123456789" not in str(e.value)


def test_an_empty_token_is_an_error() -> None:
    """An empty `auth_token`, as of an unset variable, is a ConfigError: it would be the secret of a client."""
    with pytest.raises(ConfigError, match="auth_token"):
        GuardedSettings.load([], environ={"PENSTOCK_AUTH_TOKEN": "", "PENSTOCK_INSECURE_NO_AUTH": "true"})


def test_tokens_have_the_scopes_of_their_credentials() -> None:
    """`auth_token` permits everything, and an admin's secret may also read."""
    assert GuardedSettings().tokens_by_scope() == {}
    shop = Credential(secret=SecretStr("0123456789abcdef"), scopes=("ingest",))
    ops = Credential(secret=SecretStr("fedcba9876543210"), scopes=("admin",))
    found = GuardedSettings(credentials={"shop": shop, "ops": ops}).tokens_by_scope()
    assert found == {"ingest": "0123456789abcdef", "admin": "fedcba9876543210", "read": "fedcba9876543210"}
    owner = SecretStr("x" * 16)
    found = GuardedSettings(auth_token=owner, credentials={"ops": ops}).tokens_by_scope()
    assert found == dict.fromkeys(("ingest", "read", "admin"), "x" * 16)
