"""Settings. Flags override the environment, which overrides a TOML file, which overrides defaults.

A command's settings are a class derived from `CommandSettings`, a service's settings one derived from
`ServiceSettings`. The same setting has three spellings: the flag `--http.port`, the variable `PENSTOCK_HTTP__PORT` and
the TOML key `port` in the table `[http]`. `--config` or `PENSTOCK_CONFIG` names the file; by default it is
`penstock.toml` in the current folder, if it exists. File and environment may contain settings of other commands, so
that one file and one environment serve all. A name that no command has is rejected. A command accepts only its own
flags. The error of a wrong value names the setting.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings.exceptions import SettingsError

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.setting_names import (
    DELIMITER,
    ENV_PREFIX,
    flag,
    hint,
    siblings,
    unknown_flags,
    unknown_keys,
    unknown_variables,
    variable,
)

DEFAULT_FILE = "penstock.toml"
SASL_CREDENTIALS = ("sasl_username", "sasl_password")

S = TypeVar("S", bound="CommandSettings")

_SERVER = re.compile(r"(?:\[[0-9a-fA-F:.]+(?:%\w+)?\]|[^\s:/\[\],@]+):(?P<port>\d{1,5})")

PORT_MAX = 65_535
Port = Annotated[int, Field(ge=0, le=PORT_MAX)]
PositiveMs = Annotated[int, Field(gt=0)]


def _require_path(given: Any) -> Any:
    if given == "":
        raise ValueError("must not be empty")
    return given


NonEmptyPath = Annotated[Path, BeforeValidator(_require_path)]
"""A path that is not empty: an empty one would be the current folder."""

HEAD_BYTES_MIN = 4_096
"""The minimum of `http.max_head_bytes`: a browser's headers take some 1,000 bytes, with cookies more."""


def _require_bootstrap_servers(text: str) -> str:
    """Return the servers without spaces between them. Commands in messages name them as one argument."""
    servers = [server.strip() for server in text.split(",")]
    for server in servers:
        found = _SERVER.fullmatch(server)
        if found is None or not 0 < int(found["port"]) <= PORT_MAX:
            raise ValueError(f"{server!r} is not host:port")
    return ",".join(servers)


def require_heartbeat_within_session(heartbeat_interval_ms: int, session_timeout_ms: int) -> None:
    """Raise ValueError if a group's member would have no heartbeat within its session timeout."""
    if heartbeat_interval_ms >= session_timeout_ms:
        raise ValueError(
            f"heartbeat_interval_ms={heartbeat_interval_ms} must be below session_timeout_ms={session_timeout_ms}"
        )


class Section(BaseModel):
    """A table of settings. ConfigError names the settings that are wrong, contradict each other, or are missing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    if not TYPE_CHECKING:
        # Type checkers and editors derive the signature from the fields.

        def __init__(self, /, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as e:
                raise _config_error(type(self), e) from None

        # With this mark pydantic fills a section of other settings without this method; errors keep their whole path.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """The settings of a mapping. Raises ConfigError as the constructor does."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as e:
            raise _config_error(cls, e) from None

    @classmethod
    def given(cls, settings: Self | None) -> Self:
        """The settings that were passed to a client, or the defaults for None. Raises ConfigError for another type."""
        if settings is None:
            return cls()
        if not isinstance(settings, cls):
            raise ConfigError(f"a client needs {cls.__name__}(...), got {type(settings).__name__}")
        return settings


class KafkaSettings(Section):
    """How to reach Kafka.

    The names are those of Kafka's Java clients, with underscores for dots. Exceptions are `sasl_username`,
    `sasl_password`, `sasl_oauth_token_provider`, and the PEM files `ssl_cafile`, `ssl_certfile` and `ssl_keyfile`.
    """

    # Without this, pydantic's error for a wrong section shows all its values.
    model_config = ConfigDict(hide_input_in_errors=True)

    bootstrap_servers: Annotated[str, AfterValidator(_require_bootstrap_servers)] = Field(
        default="localhost:9092", description="host:port, comma-separated"
    )
    client_id: str | None = Field(
        default=None, min_length=1, description="default: penstock, the host, the process id and a number"
    )
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    sasl_oauth_token_provider: str | None = Field(
        default=None,
        pattern=r"^[\w.]+:[\w.]+$",
        description="module:function that returns an OAUTHBEARER token; it must limit the time of its requests",
    )
    ssl_cafile: NonEmptyPath | None = Field(
        default=None, description="PEM file of the certificate authorities to trust"
    )
    ssl_certfile: NonEmptyPath | None = Field(default=None, description="PEM file of the client's certificate")
    ssl_keyfile: NonEmptyPath | None = Field(default=None, description="PEM file of the client's key")
    ssl_key_password: SecretStr | None = None
    request_timeout_ms: PositiveMs = 30_000
    metadata_max_age_ms: PositiveMs = 300_000
    metadata_recovery_strategy: Literal["none", "rebootstrap"] = "rebootstrap"
    metadata_recovery_rebootstrap_trigger_ms: int = Field(
        default=300_000,
        ge=0,
        description="rebootstrap after this time without metadata from known brokers; at once if none is reachable",
    )
    connections_max_idle_ms: PositiveMs = 540_000
    send_buffer_bytes: int = Field(default=-1, ge=-1, description="the sockets' SO_SNDBUF; -1: the system's default")
    receive_buffer_bytes: int = Field(default=-1, ge=-1, description="the sockets' SO_RCVBUF; -1: the system's default")
    client_dns_lookup: Literal["use_all_dns_ips", "resolve_canonical_bootstrap_servers_only"] = Field(
        default="use_all_dns_ips",
        description="try all addresses of a host in turn; or first replace bootstrap_servers by their addresses' names",
    )
    socket_connection_setup_timeout_ms: PositiveMs = Field(
        default=10_000, description="TCP, TLS and SASL together; doubled with each failure in a row"
    )
    socket_connection_setup_timeout_max_ms: PositiveMs = 30_000
    reconnect_backoff_ms: PositiveMs = 50
    reconnect_backoff_max_ms: PositiveMs = 1_000
    retry_backoff_ms: PositiveMs = 100

    @classmethod
    def of(cls, given: KafkaSettings | str) -> KafkaSettings:
        """KafkaSettings of a client's argument: settings, or bootstrap servers as text; else raises ConfigError.

        >>> KafkaSettings.of("kafka-1:9092,kafka-2:9092").bootstrap_servers
        'kafka-1:9092,kafka-2:9092'
        """
        if isinstance(given, str):
            return cls(bootstrap_servers=given)
        if not isinstance(given, KafkaSettings):
            raise ConfigError(f'a client needs KafkaSettings(...) or "host:port", got {type(given).__name__}')
        return given

    @model_validator(mode="after")
    def _security_is_complete(self) -> Self:
        if self.security_protocol.startswith("SASL"):
            needed = ("sasl_oauth_token_provider",) if self.sasl_mechanism == "OAUTHBEARER" else SASL_CREDENTIALS
            missing = [name for name in ("sasl_mechanism", *needed) if not getattr(self, name)]
            if missing:
                raise ValueError(f"security_protocol={self.security_protocol} also needs {', '.join(missing)}")
        if self.ssl_certfile is None and (self.ssl_keyfile is not None or self.ssl_key_password is not None):
            raise ValueError("ssl_keyfile and ssl_key_password also need ssl_certfile")
        return self


class HttpSettings(Section):
    """The HTTP address of a service. Each service has a default port of its own."""

    host: str = "127.0.0.1"
    port: Port = Field(default=0, description="0: a free one, printed at start-up")
    ssl_certfile: NonEmptyPath | None = Field(
        default=None, description="PEM file of the certificate; with it the address is https"
    )
    ssl_keyfile: NonEmptyPath | None = Field(
        default=None, description="PEM file of its key, where it is not in the same file"
    )
    ssl_key_password: SecretStr | None = None
    forwarded_allow_ips: tuple[str, ...] = Field(
        default=(), description="proxies whose X-Forwarded-For and -Proto are believed: addresses or networks"
    )
    max_head_bytes: Annotated[int, Field(ge=HEAD_BYTES_MIN)] = Field(
        default=65_536, description="the longest request line and header fields of a request together; then 431 or 414"
    )

    @model_validator(mode="after")
    def _tls_has_a_certificate(self) -> Self:
        if self.ssl_certfile is None and (self.ssl_keyfile is not None or self.ssl_key_password is not None):
            raise ValueError("ssl_keyfile and ssl_key_password also need ssl_certfile")
        return self


class LogSettings(Section):
    """How a service logs, to standard error."""

    format: Literal["auto", "json", "console"] = Field(
        default="auto", description="auto: console on a terminal, else json"
    )
    level: Literal["debug", "info", "warning", "error"] = "info"


class CommandSettings(BaseSettings):
    """Base of the settings of commands. A subclass has fields for the settings that its command uses.

    A program may also construct it. ConfigError then names the arguments that are unknown, wrong or missing.

    Some commands have no subclass, for example `connect`, which reads properties files.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=DELIMITER,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
    )

    FLAGS_ONLY: ClassVar[frozenset[str]] = frozenset()
    """Settings that only flags set, since they are arguments of one call. Another command may use the names."""

    log: LogSettings = LogSettings()

    if not TYPE_CHECKING:
        # As for `Section`. `load` does not come here: it ignores the settings of other commands.

        def __init__(self, /, **values: Any) -> None:
            cls = type(self)
            # pydantic-settings has options whose names begin with an underscore.
            unknown = [name for name in values if name not in cls.model_fields and not name.startswith("_")]
            if unknown:
                raise ConfigError(f"{cls.__name__}: " + "; ".join(_describe_unknown_setting(cls, [n]) for n in unknown))
            try:
                super().__init__(**values)
            except ValidationError as e:
                raise _config_error(cls, e) from None
            except SettingsError as e:
                raise ConfigError(f"{cls.__name__}: {e}") from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, _SectionDefaults(settings_cls))

    @classmethod
    def load(
        cls,
        arguments: Sequence[str] = (),
        *,
        program: str = "penstock",
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """Load a command's settings from its flags, the environment and the settings file.

        Raises ConfigError, which names the file that cannot be read, the unknown settings, or the settings with wrong
        values. `--help` prints every setting and exits.
        """
        environ = os.environ if environ is None else environ
        arguments, file = find_settings_file(arguments, environ)
        in_file = _read_toml(file) if file else {}
        unknown = unknown_variables(cls, environ) + [f"{file}: {message}" for message in unknown_keys(cls, in_file)]
        if unknown:
            raise ConfigError(f"{program}: {'; '.join(unknown)}")
        in_file = {name: value for name, value in in_file.items() if name not in cls.FLAGS_ONLY}
        of_others = {variable([name]) for name in cls.FLAGS_ONLY}
        environ = {name: value for name, value in environ.items() if name.upper() not in of_others}
        sources: list[PydanticBaseSettingsSource] = []
        own = {
            "settings_customise_sources": classmethod(lambda *_, **__: tuple(sources)),
            "__init__": BaseSettings.__init__,
            "__doc__": cls.__doc__,
            "__module__": cls.__module__,
        }
        loaded: Any = type(cls.__name__, (cls,), own)
        try:
            sources.append(
                CliSettingsSource(
                    loaded,
                    cli_prog_name=program,
                    cli_parse_args=list(arguments),
                    cli_hide_none_type=True,
                    cli_kebab_case=True,
                    cli_exit_on_error=False,
                    cli_implicit_flags=True,
                    cli_avoid_json=True,
                )
            )
            sources.append(_Environment(loaded, environ))
            sources.append(InitSettingsSource(loaded, in_file))
            sources.append(_SectionDefaults(loaded))
            # By its iterator: dict() would take any class with a method `keys` for a mapping.
            return cast(Self, cls.model_construct(**dict(iter(loaded()))))
        except ValidationError as e:
            raise ConfigError(
                f"{program}: " + "; ".join(_explain_setting_error(cls, error) for error in e.errors())
            ) from None
        except ConfigError as e:
            raise ConfigError(f"{program}: {e}") from None
        except SettingsError as e:
            raise ConfigError(f"{program}: {_hide_flag_values(cls, str(e))}") from None


class DaemonSettings(CommandSettings):
    """Base of the settings of a command with an HTTP address that runs until it is stopped."""

    http: HttpSettings = HttpSettings()
    shutdown_timeout_ms: PositiveMs = Field(
        default=30_000, description="how long a graceful shutdown may take before it is cut off"
    )


class ServiceSettings(DaemonSettings):
    """Base of the settings of a service that uses Kafka."""

    kafka: KafkaSettings = KafkaSettings()


class _SectionDefaults(InitSettingsSource):
    """The settings that the default of a section sets itself: `HttpSettings(port=8081)` sets the port.

    They also apply if other sources set some of the section. In contrast to pydantic's
    `nested_model_default_partial_update`, the rest does not count as set (`model_fields_set`).
    """

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        sections = {name: field.default for name, field in settings_cls.model_fields.items()}
        super().__init__(
            settings_cls, {name: _own_settings(one) for name, one in sections.items() if isinstance(one, BaseModel)}
        )


def _own_settings(section: BaseModel) -> dict[str, Any]:
    return {
        name: _own_settings(value) if isinstance(value, BaseModel) else value
        for name, value in section
        if name in section.model_fields_set or isinstance(value, BaseModel)
    }


class _Environment(EnvSettingsSource):
    def __init__(self, settings_cls: type[BaseSettings], environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(settings_cls)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in self._environ.items()}

    def prepare_field_value(self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool) -> Any:
        try:
            return super().prepare_field_value(field_name, field, value, value_is_complex)
        # Pydantic's message names the field and this class.
        except ValueError:
            name = variable([field_name])
            named = f"one of {name}{DELIMITER}*"
            raise ConfigError(f"{named if value is None else f'{name}, or {named}'}: not valid JSON") from None


def find_settings_file(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], Path | None]:
    """Return the arguments without `--config`, and the path of the settings file, None if there is none."""
    rest = []
    # In a compose file, an empty variable is one that is not set.
    named = environ.get(f"{ENV_PREFIX}CONFIG") or None
    iterator = iter(arguments)
    for argument in iterator:
        if argument == "--config":
            named = next(iterator, None)
            if named is None:
                raise ConfigError("--config: needs the path of a TOML file")
        elif argument.startswith("--config="):
            named = argument.removeprefix("--config=")
        else:
            rest.append(argument)
    if named is not None:
        return rest, Path(named)
    return rest, Path(DEFAULT_FILE) if Path(DEFAULT_FILE).is_file() else None


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        # Some editors begin a file with a byte order mark.
        return tomllib.loads(file.read_bytes().decode("utf-8-sig"))
    except OSError as e:
        raise ConfigError(f"{file}: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file}: {e}") from None


def _config_error(cls: type[BaseModel], error: ValidationError) -> ConfigError:
    return ConfigError(f"{cls.__name__}: " + "; ".join(_describe_setting_error(cls, one) for one in error.errors()))


def _explain_setting_error(cls: type[BaseModel], error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    message = _describe_setting_error(cls, error)
    if not path or error["type"] == "extra_forbidden":
        return message
    is_flag = issubclass(cls, CommandSettings) and path[0] in cls.FLAGS_ONLY
    return f"{message} ({flag(path)})" if is_flag else f"{message} ({flag(path)}, {variable(path)})"


def _describe_setting_error(cls: type[BaseModel], error: Any) -> str:
    """The error of one setting, or of several together."""
    path = [str(part) for part in error["loc"]]
    name = ".".join(path)
    message = error["msg"].removeprefix("Value error, ")
    # Pydantic's message names a class of Penstock, which users of files and variables do not see.
    if error["type"] == "model_type" and not isinstance(error["input"], BaseModel):
        message = "Input should be a table of settings"
    if error["type"] == "extra_forbidden":
        return _describe_unknown_setting(cls, path)
    if not name:
        return str(message)
    is_shown = error["type"] != "missing" and not isinstance(error["input"], dict | BaseModel)
    return f"{name}: {message}" + (f", got {_show_setting_value(path, error['input'])}" if is_shown else "")


def _describe_unknown_setting(cls: type[BaseModel], path: Sequence[str]) -> str:
    return f"{'.'.join(path)}: no such setting{hint(path, siblings(cls, path), KafkaSettings.model_fields)}"


def _show_setting_value(path: Sequence[str], value: Any) -> str:
    secret = any(word in part for part in path for word in ("password", "token", "secret", "credential"))
    return "a hidden value" if secret else repr(value)


def _hide_flag_values(cls: type[BaseModel], message: str) -> str:
    """The error without values of unknown flags, since the value of a misspelled setting may be a secret.

    It keeps the first unknown argument, and each later one that begins with `--`, up to its `=`. Any other argument may
    be a value.
    """
    # argparse takes -http.port=1 as -h with a value.
    message = "".join(message.partition("ignored explicit argument")[:2])
    head, unknown, arguments = message.partition("unrecognized arguments: ")
    return head + unknown + unknown_flags(cls, re.findall(r"(?:^|\s(?=--))([^\s=]+)", arguments))


def load_settings_or_exit(cls: type[S], arguments: Sequence[str], program: str) -> S:
    """Load a command's settings. If one is wrong, print one line on standard error and exit with status 2."""
    try:
        return cls.load(arguments, program=program)
    except ConfigError as e:
        print(e, file=sys.stderr)
        raise SystemExit(2) from None
