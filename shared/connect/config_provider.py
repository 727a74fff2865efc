"""Secrets and other values from outside a configuration: `${env:NAME}`, `${file:PATH:KEY}`, `${dir:PATH:FILE}`.

The worker stores and shows a configuration with its variables (`${…}`). When it starts a connector or task, it replaces
them by their values. A variable of an unknown provider, or of an unknown key, stays unchanged. A file of `${file:…}`
that does not exist, and any file that is not allowed or cannot be read, is a ConfigError.

A task configuration that a connector returns has values. If a setting in it has the value with which the connector was
started, the worker stores the setting with its variables. A value that the connector has changed, or copied into
another setting, is stored as it is.

A worker's own settings may have variables too. They are replaced by their values when the worker reads its file.

`config.providers` names a worker's providers. As in Kafka Connect, the default is none: otherwise, a client that may
create connectors could read the worker's environment and files.

An error message may contain a value. `masking` returns a function that replaces the value by its variable.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.properties import parse_properties
from penstock.shared.connect.redaction import (
    Mask,
    defining,
    redacted_value,
    replace_variables,
    secrets_in,
    variables_in,
)

MASKED_LENGTH_MIN = 4
"""Shorter values are not masked in texts about other settings: they may be parts of words."""
FILE_BYTES_MAX = 1 << 20
"""A larger file is rejected: it does not hold secrets."""


class ConfigProvider(ABC):
    """Returns values by path and key. Raises ConfigError if it cannot read them."""

    def configure(self, params: Mapping[str, str]) -> None:
        """Take the provider's settings, `config.providers.<name>.param.*`. Raises ConfigError if one is invalid."""

    @abstractmethod
    def get(self, path: str, key: str) -> str | None:
        """Return the value, or None if the key does not exist."""


class EnvVarConfigProvider(ConfigProvider):
    """The process's environment: all variables, or those that `allowlist.pattern` matches.

    The key is the variable's name. The path is ignored.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._allowed: re.Pattern[str] | None = None

    def configure(self, params: Mapping[str, str]) -> None:
        if pattern := params.get("allowlist.pattern"):
            try:
                self._allowed = re.compile(pattern)
            except re.error as e:
                raise ConfigError(f"allowlist.pattern: {pattern!r} is not a regular expression: {e}") from None

    def get(self, path: str, key: str) -> str | None:
        if self._allowed is not None and not self._allowed.fullmatch(key):
            return None
        return self._environ.get(key)


class _PathConfigProvider(ConfigProvider):
    def __init__(self) -> None:
        self._allowed: list[Path] | None = None

    def configure(self, params: Mapping[str, str]) -> None:
        if allowed := params.get("allowed.paths"):
            paths = [path.strip() for path in allowed.split(",")]
            for path in paths:
                if not Path(path).is_absolute():
                    # An empty path is the worker's current folder.
                    raise ConfigError(f"allowed.paths: {path!r} must be an absolute path")
            self._allowed = [Path(path).resolve() for path in paths]

    def _read_allowed_file(self, path: Path) -> str | None:
        """Return the file's text, or None if there is no regular file at the path.

        Raises ConfigError for a path outside of `allowed.paths`, whether or not it exists, and for an unreadable file.
        """
        if "\0" in str(path):
            raise ConfigError(f"{path} must not have a NUL character")
        # Resolved before the comparison: a link or `..` must not lead out of the allowed folders.
        resolved = Path(os.path.realpath(path))
        if self._allowed is not None and not any(resolved.is_relative_to(allowed) for allowed in self._allowed):
            raise ConfigError(f"{path} is outside of allowed.paths")
        try:
            if not stat.S_ISREG(resolved.stat().st_mode):
                return None
            with resolved.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
            if len(data) > FILE_BYTES_MAX:
                raise ConfigError(f"{path} has more than {FILE_BYTES_MAX} bytes")
            return data.decode()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise ConfigError(f"{path}: {e.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: not UTF-8") from None


class FileConfigProvider(_PathConfigProvider):
    """The properties of the file that the path names. The key is a property's name."""

    def get(self, path: str, key: str) -> str | None:
        if not path:
            return None
        text = self._read_allowed_file(Path(path))
        if text is None:
            raise ConfigError(f"{path}: No such file")
        return parse_properties(text).get(key)


class DirectoryConfigProvider(_PathConfigProvider):
    """The files of the folder that the path names. The key is a file's name, and the value is its content."""

    def get(self, path: str, key: str) -> str | None:
        if not path or not key or Path(key).name != key:
            return None
        return self._read_allowed_file(Path(path) / key)


PROVIDERS: dict[str, type[ConfigProvider]] = {
    "env": EnvVarConfigProvider,
    "file": FileConfigProvider,
    "dir": DirectoryConfigProvider,
    "org.apache.kafka.common.config.provider.EnvVarConfigProvider": EnvVarConfigProvider,
    "org.apache.kafka.common.config.provider.FileConfigProvider": FileConfigProvider,
    "org.apache.kafka.common.config.provider.DirectoryConfigProvider": DirectoryConfigProvider,
}


def unresolved(made: Mapping[str, str], raw: Mapping[str, str], resolved: Mapping[str, str]) -> dict[str, str]:
    """Return a connector's task configuration, with variables in the settings that the connector only copied.

    `raw` is the connector's configuration, and `resolved` the one with values, with which the connector was started.
    """
    return {
        name: raw[name] if "${" in raw.get(name, "") and resolved.get(name) == value else value
        for name, value in made.items()
    }


class ConfigTransformer:
    """Resolves variables in configurations."""

    def __init__(self, providers: Mapping[str, ConfigProvider]) -> None:
        self._providers = dict(providers)

    @classmethod
    def of_worker(cls, names: Sequence[str], props: Mapping[str, str]) -> ConfigTransformer:
        """Make the providers that `config.providers` names.

        `config.providers.<name>.class` is the class of the provider `<name>`: a key of `PROVIDERS`. The default is
        `<name>`, such as `env`, `file` or `dir`. Raises ConfigError for any other class, and for an invalid setting of
        a provider.
        """
        providers = {}
        for name in names:
            path = props.get(f"config.providers.{name}.class", name)
            if path not in PROVIDERS:
                there = ", ".join(known for known in PROVIDERS if "." not in known)
                raise ConfigError(f"config.providers.{name}.class: there is no config provider {path}, only {there}")
            prefix = f"config.providers.{name}.param."
            providers[name] = PROVIDERS[path]()
            try:
                providers[name].configure({key[len(prefix) :]: props[key] for key in props if key.startswith(prefix)})
            except ConfigError as e:
                raise ConfigError(f"{prefix}{e}") from None
        return cls(providers)

    def resolve(self, props: Mapping[str, str]) -> dict[str, str]:
        """Return the configuration with variables replaced by their values. The result must not be stored.

        Raises ConfigError if a provider fails.
        """
        return {name: self._resolve_variables(value) if "${" in value else value for name, value in props.items()}

    def masking(self, raw: Mapping[str, str], plugin: type | None = None) -> Mask:
        """Return a function that masks the values of this configuration's variables, and its other secrets.

        `plugin` is the connector's class, whose definitions decide which settings are secrets, or None. Without it, or
        if it raises an error, the names of the settings decide.

        A secret of fewer than MASKED_LENGTH_MIN characters is masked only in a text about its own setting. The values
        of a setting's variables are not masked if a provider fails.
        """
        plugin = defining(plugin)
        own: dict[str, dict[str, str]] = {}
        for name, text in raw.items():
            own[name] = secrets_in(name, text, plugin)
            if "${" in text:
                with contextlib.suppress(ConfigError):
                    own[name] |= self._values_of_variables(name, text, plugin)
            # An error may contain a value's repr.
            own[name] |= {repr(value)[1:-1]: shown for value, shown in own[name].items()}
        everywhere = {
            value: shown for each in own.values() for value, shown in each.items() if len(value) >= MASKED_LENGTH_MIN
        }

        def mask_secrets(text: str, name: str = "") -> str:
            # The longest first, since a short secret may be a part of a longer one.
            secrets = {**everywhere, **own.get(name, {})}
            for value in sorted(secrets, key=len, reverse=True):
                text = text.replace(value, secrets[value])
            return text

        return mask_secrets

    def _values_of_variables(self, name: str, text: str, plugin: type | None) -> dict[str, str]:
        """Return the texts of a setting that must not be shown, each with the text that is shown instead.

        These are the resolved value, the passwords in it, and the value of each variable in it.
        """
        found = {self._value_of_variable(match) or "": match[0] for match in variables_in(text)}
        resolved = self._resolve_variables(text)
        found[resolved] = redacted_value(name, text, plugin)
        # A variable's value may contain a password, and it may be a part of a password.
        hidden = secrets_in(name, resolved, plugin)
        hidden |= {self._resolve_variables(secret): shown for secret, shown in secrets_in(name, text, plugin).items()}
        stripped = {value.strip(): shown for value, shown in found.items()}
        return {value: shown for value, shown in {**hidden, **stripped, **found}.items() if value and value != shown}

    def _value_of_variable(self, match: re.Match[str]) -> str | None:
        provider = self._providers.get(match[1])
        return None if provider is None else provider.get(match[2] or "", match[3])

    def _resolve_variables(self, text: str) -> str:
        def resolve_variable(match: re.Match[str]) -> str:
            value = self._value_of_variable(match)
            return match[0] if value is None else value

        return replace_variables(text, resolve_variable)
