"""Secrets in configs: variables of config providers, masking in texts, and redaction of what is shown."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.config_def import ConfigDef
from penstock.shared.connect.config_provider import (
    ConfigTransformer,
    DirectoryConfigProvider,
    EnvVarConfigProvider,
    FileConfigProvider,
    unresolved,
)
from penstock.shared.connect.connectors.delta import DeltaSinkConnector
from penstock.shared.connect.connectors.http import HttpSinkConnector
from penstock.shared.connect.connectors.postgres.sink import PostgresSinkConnector
from penstock.shared.connect.errors import BadRequest
from penstock.shared.connect.redaction import is_secret, redacted, replace_variables, restored

CONFIG = {
    "connection.password": "pl41n",
    "connection.user": "ann",
    "producer.override.sasl.jaas.config": "x",
    "value.converter.basic.auth.user.info": "${env:INFO}",
    "other.password": "",
}


def transformer() -> ConfigTransformer:
    environ = {"USER_NAME": "ann", "PASS": "s3cret"}
    providers = {"env": EnvVarConfigProvider(environ), "file": FileConfigProvider(), "dir": DirectoryConfigProvider()}
    return ConfigTransformer(providers)


def test_variables_are_resolved(tmp_path: Path) -> None:
    """Variables of each provider are resolved, also several in one value; unknown ones are unchanged."""
    (tmp_path / "secrets.properties").write_text("password = p:w\n")
    (tmp_path / "token").write_text("t0ken")
    resolved = transformer().resolve(
        {
            "a": "${env:USER_NAME}/${env::PASS}",
            "b": f"${{file:{tmp_path}/secrets.properties:password}}",
            "c": f"${{dir:{tmp_path}:token}}",
            "d": "${nobody:x} ${env:MISSING} ${env:USER_NAME",
            "e": "plain",
        }
    )
    assert resolved == {
        "a": "ann/s3cret",
        "b": "p:w",
        "c": "t0ken",
        "d": "${nobody:x} ${env:MISSING} ${env:USER_NAME",
        "e": "plain",
    }


def test_copied_values_are_unresolved_again() -> None:
    """A task config contains the variable again if the connector only copied the value."""
    raw = {"password": "${env:PASS}", "topic": "t"}
    made = {"password": "s3cret", "topic": "t", "copy": "s3cret"}
    resolved = transformer().resolve(raw)
    assert unresolved(made, raw, resolved) == {"password": "${env:PASS}", "topic": "t", "copy": "s3cret"}
    assert unresolved({"password": "changed"}, raw, resolved) == {"password": "changed"}


def test_files_outside_of_the_allowed_paths_are_errors(tmp_path: Path) -> None:
    """`allowed.paths` and `allowlist.pattern` limit which values can be read."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "x").write_text("v")
    provider = DirectoryConfigProvider()
    provider.configure({"allowed.paths": str(inside)})
    assert provider.get(str(inside), "x") == "v"
    assert provider.get(str(inside), "../out/x") is None
    for key in ("x", "missing"):
        with pytest.raises(ConfigError, match=r"outside of allowed\.paths"):
            provider.get(str(outside), key)
    environment = EnvVarConfigProvider({"A": "1", "B": "2"})
    environment.configure({"allowlist.pattern": "A"})
    assert (environment.get("", "A"), environment.get("", "B")) == ("1", None)


def test_a_worker_names_its_providers(tmp_path: Path) -> None:
    """`config.providers` names Kafka's or our classes. An unknown provider, an invalid pattern, or an allowed path that
    is empty or relative is an error.
    """
    props = {"config.providers.f.class": "org.apache.kafka.common.config.provider.FileConfigProvider"}
    file = tmp_path / "p"
    file.write_text("k=v")
    assert ConfigTransformer.of_worker(["f"], props).resolve({"x": f"${{f:{file}:k}}"}) == {"x": "v"}
    with pytest.raises(ConfigError, match="vault"):
        ConfigTransformer.of_worker(["vault"], {})
    pattern = "config.providers.env.param.allowlist.pattern"
    with pytest.raises(ConfigError, match=re.escape(pattern)):
        ConfigTransformer.of_worker(["env"], {pattern: "APP_("})
    paths = "config.providers.file.param.allowed.paths"
    for allowed in ("/secrets,", "secrets"):
        with pytest.raises(ConfigError, match=re.escape(paths)):
            ConfigTransformer.of_worker(["file"], {paths: allowed})


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    """An unreadable file is an error with the reason."""
    with pytest.raises(ConfigError, match="No such file"):
        transformer().resolve({"x": f"${{file:{tmp_path}/none:k}}"})
    with pytest.raises(ConfigError, match="NUL"):
        transformer().resolve({"x": f"${{file:{tmp_path}\0/none:k}}"})
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match="symbolic links"):
        transformer().resolve({"x": f"${{file:{tmp_path}/loop:k}}"})


def test_a_missing_file_of_a_folder_is_no_error_but_an_unreadable_one_is(tmp_path: Path) -> None:
    """A variable whose file does not exist in the folder stays unchanged; any other failure is an error."""
    provider = DirectoryConfigProvider()
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    assert [provider.get(str(tmp_path), key) for key in ("missing", "folder", "pipe")] == [None] * 3
    assert provider.get(str(tmp_path / "file"), "x") is None
    with pytest.raises(ConfigError, match="name too long"):
        provider.get(str(tmp_path), "x" * 300)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may search each folder")
def test_a_folder_that_may_not_be_searched_is_an_error(tmp_path: Path) -> None:
    """A folder of another user is an error with the reason."""
    tmp_path.chmod(0)
    with pytest.raises(ConfigError, match="Permission denied"):
        DirectoryConfigProvider().get(str(tmp_path), "x")
    tmp_path.chmod(0o700)


def test_masking_replaces_values_by_variables() -> None:
    """Masking replaces values in texts by their variables; a short value only for its own setting."""
    raw = {"url": "pg://${env:USER_NAME}:${env:PASS}@h", "n": "${env:USER_NAME}", "plain": "x"}
    mask = transformer().masking(raw)
    assert mask("no host in pg://ann:s3cret@h") == "no host in pg://${env:USER_NAME}:${env:PASS}@h"
    assert mask("bad s3cret, ann") == "bad ${env:PASS}, ann"
    assert mask("Invalid value ann", "n") == "Invalid value ${env:USER_NAME}"
    assert transformer().masking({"f": "${file:/no/such/file:k}", "p": "${env:PASS}"})("s3cret") == "${env:PASS}"


def test_masking_hides_passwords_with_variables() -> None:
    """Masking hides a URL's password that is partly a variable, or part of a variable's value."""
    environ = {"USER_NAME": "ann", "PASS": "s3/cret", "WORD": "s3cret", "URL": "http://ann:t0k3n@api"}
    mask = ConfigTransformer({"env": EnvVarConfigProvider(environ)}).masking(
        {
            "http.url": "http://${env:USER_NAME}:pl41n${env:PASS}@api/x",
            "proxy.url": "http://ann:pl41n${env:WORD}@api/x?sig=${env:SIGNATURE}",
            "other.url": "${env:URL}",
        }
    )
    assert mask("password pl41ns3/cret rejected") == "password [hidden] rejected"
    assert mask("password pl41ns3cret rejected") == "password [hidden] rejected"
    assert mask("password t0k3n rejected by http://ann:t0k3n@api") == "password [hidden] rejected by ${env:URL}"
    assert mask("s3cret, ${env:SIGNATURE}") == "${env:WORD}, ${env:SIGNATURE}"


def test_masking_hides_secrets_without_variables() -> None:
    """Masking hides secret settings and passwords of URLs, also in Python's repr."""
    mask = transformer().masking(
        {"u": "http://ann:pl41n@api/x?api_key=k3y0", "o.ssl.keystore.key": "-----BEGIN\nMII", "topics": "orders"}
    )
    assert (
        mask("no response of http://ann:pl41n@api/x?api_key=k3y0")
        == "no response of http://ann:[hidden]@api/x?api_key=[hidden]"
    )
    assert mask("pl41n of orders, k3y0") == "[hidden] of orders, [hidden]"
    assert transformer().masking({"password": "pl41n\n"})("bad pl41n") == "bad [hidden]"
    assert mask(f"input_value={'-----BEGIN' + chr(10) + 'MII'!r}") == "input_value='[hidden]'"
    env = EnvVarConfigProvider({"PASS": r"pl4\1n"})
    slashed = ConfigTransformer({"env": env}).masking(
        {"u": r"http://ann:pl\41n@api", "v": "http://ann:${env:PASS}@api"}
    )
    for secret in (r"pl\41n", r"pl4\1n"):
        assert secret not in slashed(f"{secret} {secret!r}")
        assert repr(secret)[1:-1] not in slashed(f"{secret!r} of {f'http://ann:{secret}@api'!r}")


def test_secrets_are_hidden_and_variables_are_not() -> None:
    """Secrets are hidden by the setting's type or name; variables and empty values are not."""
    assert redacted(CONFIG, PostgresSinkConnector) == {
        **CONFIG,
        "connection.password": "[hidden]",
        "producer.override.sasl.jaas.config": "[hidden]",
    }
    assert not is_secret("connection.user", PostgresSinkConnector)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_connector_that_cannot_define_its_settings_shows_no_secret(error: type[BaseException]) -> None:
    """If a connector's `config` raises an error, none of its settings is shown or restored. In a text about it, the
    names of its settings decide which are secrets."""

    class Broken(HttpSinkConnector):
        @classmethod
        def config(cls) -> ConfigDef:
            raise error("on purpose")

    mask = transformer().masking({"other.password": "pl41n", "http.url": "http://api"}, Broken)
    assert mask("pl41n rejected by http://api") == "[hidden] rejected by http://api"
    for _ in range(2):
        assert redacted({"sftp.passphrase": "pl41n"}, Broken) == {"sftp.passphrase": "[hidden]"}
        with pytest.raises(error, match="on purpose"):
            restored({"sftp.passphrase": "[hidden]"}, {"sftp.passphrase": "pl41n"}, Broken)


def test_a_secret_beside_a_variable_is_hidden() -> None:
    """A secret is hidden unless it consists only of variables. This holds for URLs and masked texts, too."""
    config = {
        "producer.override.sasl.jaas.config": 'username="${env:USER_NAME}" password="pl41n"',
        "http.headers": "X-Key: ${env:PASS}, Authorization: Bearer t0k3n",
        "other.password": "${env:USER_NAME}${env:PASS}",
        "http.url": "http://${env:USER_NAME}:pl41n${env:PASS}@api/x?api_key=${env:PASS}",
        "proxy.url": "http://${env:USER_NAME}:${file:/no/such/file:k}@proxy",
    }
    shown = {
        **config,
        "producer.override.sasl.jaas.config": "[hidden]",
        "http.headers": "[hidden]",
        "http.url": "http://${env:USER_NAME}:[hidden]@api/x?api_key=${env:PASS}",
    }
    assert redacted(config, HttpSinkConnector) == shown
    assert restored(shown, config, HttpSinkConnector) == config
    mask = transformer().masking(config)
    del config["proxy.url"]
    for name, value in transformer().resolve(config).items():
        assert mask(f"bad: {value}, {config[name]}") == f"bad: {shown[name]}, {shown[name]}"


def test_a_config_that_was_read_can_be_written_back() -> None:
    """A redacted value keeps the stored one; without a stored value it is a BadRequest."""
    sent = {**redacted(CONFIG, PostgresSinkConnector), "connection.user": "bob", "other.password": "new"}
    assert restored(sent, CONFIG, PostgresSinkConnector) == {
        **CONFIG,
        "connection.user": "bob",
        "other.password": "new",
    }
    with pytest.raises(BadRequest, match=r"connection\.password.*\[hidden\]"):
        restored(sent, {}, PostgresSinkConnector)
    assert restored({"file": "[hidden]"}, {}, None) == {"file": "[hidden]"}


URL = "postgresql://ann:pl41n@db/shop?sslmode=require"


def test_passwords_of_urls_are_hidden() -> None:
    """A URL's password is hidden, and restored only for the same URL."""
    config = {"connection.url": URL, "http.url": "http://api/items?page=1"}
    assert redacted(config, PostgresSinkConnector) == {
        "connection.url": "postgresql://ann:[hidden]@db/shop?sslmode=require",
        "http.url": "http://api/items?page=1",
    }
    assert restored(redacted(config, PostgresSinkConnector), config, PostgresSinkConnector) == config
    with pytest.raises(BadRequest, match=r"connection\.url.*\[hidden\]"):
        restored({"connection.url": URL.replace("pl41n@db", "[hidden]@other")}, config, PostgresSinkConnector)


@pytest.mark.parametrize(
    "name",
    [
        *("AWS_SECRET_ACCESS_KEY", "azure_storage_account_key", "account_key", "azure_storage_sas_key"),
        *("google_service_account_key", "connection_string"),
        *("azure_storage_master_key", "master_key", "AWS_SSE_CUSTOMER_KEY_BASE64"),
    ],
)
def test_keys_of_object_stores_are_hidden(name: str) -> None:
    """The sinks to object stores do not define these settings: their names suggest a secret."""
    shown = {"storage.azure_storage_account_name": "shop", "storage.AWS_ACCESS_KEY_ID": "AKIA1"}
    config = {f"storage.{name}": "s3cret", **shown}
    assert redacted(config, DeltaSinkConnector) == {**config, f"storage.{name}": "[hidden]"}


def test_the_signature_of_a_shared_url_is_hidden() -> None:
    """Azure's URLs have their secret in `sig`. Parameters such as `sigma` are not secret."""
    config = {"http.url": "https://shop/x?sv=1&sig=a%2Fb&sigma=2"}
    assert redacted(config, None) == {"http.url": "https://shop/x?sv=1&sig=[hidden]&sigma=2"}


def test_headers_and_private_keys_are_hidden() -> None:
    """HTTP headers and PEM keys are hidden."""
    config = {"http.headers": "Authorization: Bearer t0k3n", "producer.override.ssl.keystore.key": "-----BEGIN PRIVATE"}
    assert set(redacted(config, HttpSinkConnector).values()) == {"[hidden]"}
    assert set(redacted(config, None).values()) == {"[hidden]"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("${${:x}", ""),
        ("${:${env:A}", "${:"),
        ("${env} ${}${:}${env:A}", "${env} ${}${:}"),
        ("${env:A${file:/a:b}-", "-"),
        ("${env:A}${env:B", "${env:B"),
    ],
)
def test_a_text_that_is_almost_a_variable_is_literal(text: str, shown: str) -> None:
    """A variable has a provider, a colon and an end. It may contain the beginning of another one, as in Kafka."""
    assert replace_variables(text, lambda _: "") == shown


@pytest.mark.parametrize(
    ("start", "repeated"), [("http://h/", "${a:"), ("http://h/", "${a"), ("http://h/?", "token"), ("", "${://a:b}")]
)
def test_a_long_text_is_redacted_in_linear_time(start: str, repeated: str) -> None:
    """A text of 60 KB that looks like many variables or secrets is redacted at once. In quadratic time it took
    minutes."""
    text = start + repeated * (60_000 // len(repeated))
    for value in (text, text + "}"):
        assert redacted({"url": value}, None) == {"url": value}
