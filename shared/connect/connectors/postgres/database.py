"""The database of the Postgres connectors: the connection and its settings, transactions, and the driver's errors."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any, NamedTuple

from penstock.shared.common.errors import ConfigError, RetriableError
from penstock.shared.common.extras import missing
from penstock.shared.common.log import get_logger
from penstock.shared.connect.config_def import HIGH, LOW, MEDIUM, NO_DEFAULT, ConfigDef, Type, at_least, invalid
from penstock.shared.connect.errors import ConnectError

log = get_logger(__name__)

URL = re.compile(r"(?:jdbc:)?(postgres(?:ql)?://.+)")


def driver() -> ModuleType:
    """Return the module asyncpg, which the extra `postgres` installs."""
    try:
        return importlib.import_module("asyncpg")
    except ModuleNotFoundError:
        raise ConfigError(missing("the Postgres connector", "asyncpg")) from None


def connection_config() -> ConfigDef:
    """Return the definitions of the settings that source and sink share: of the connection and of retries."""
    return (
        ConfigDef()
        .define("connection.url", Type.STRING, NO_DEFAULT, HIGH,
                "postgresql://host:port/database. The prefix jdbc: is allowed.", _validate_postgres_url,
                group="Connection", order=1)
        .define("connection.user", Type.STRING, None, HIGH, "Database user.", group="Connection", order=2)
        .define("connection.password", Type.PASSWORD, None, HIGH,
                "Password of the database user.", group="Connection", order=3)
        .define("connection.timeout.ms", Type.INT, 10_000, LOW, "Maximum time to connect.", at_least(1),
                group="Connection", order=4)
        .define("statement.timeout.ms", Type.INT, 60_000, LOW,
                "Maximum time of one statement, except those that store unread rows or move a slot.", at_least(1),
                group="Connection", order=5)
        .define("max.retries", Type.INT, 10, MEDIUM, "Maximum number of retries after a temporary error.",
                at_least(0), group="Retries", order=1)
        .define("retry.backoff.ms", Type.INT, 3_000, MEDIUM, "Delay before each retry.", at_least(1),
                group="Retries", order=2)
    )  # fmt: skip


def _validate_postgres_url(name: str, value: Any) -> None:
    if value is not None and URL.fullmatch(value) is None:
        raise invalid(name, value, "must be a postgresql:// URL")


async def connect(values: Mapping[str, Any]) -> Any:
    """Return a connection. The time zone of its session is UTC, so times without a zone are UTC.

    Raises RetriableError for a temporary error, such as a database that cannot be reached, else ConnectError. Raises
    ConfigError if asyncpg is not installed.
    """
    asyncpg = driver()
    match = URL.fullmatch(values["connection.url"])
    assert match is not None
    password = values["connection.password"]
    try:
        return await asyncpg.connect(
            match[1],
            user=values["connection.user"],
            password=None if password is None else password.value,
            timeout=values["connection.timeout.ms"] / 1000,
            command_timeout=values["statement.timeout.ms"] / 1000,
            server_settings={"timezone": "UTC"},
            # With a cached statement, COPY would send a value in the form of the type that its column had before.
            statement_cache_size=0,
        )
    except Exception as e:
        raise translated(e) from e


class Codec(NamedTuple):
    """How values of one of Postgres's types are encoded and decoded; `form` is text, binary or tuple."""

    type: str
    form: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


async def set_codecs(connection: Any, codecs: Iterable[Codec]) -> None:
    """Replace the driver's own codecs of these types."""
    for codec in codecs:
        await connection.set_type_codec(
            codec.type, schema="pg_catalog", encoder=codec.encode, decoder=codec.decode, format=codec.form
        )


@asynccontextmanager
async def transaction(connection: Any, *, keep: bool = True) -> AsyncIterator[None]:
    """One transaction. At its end it is committed, or rolled back if `keep` is False.

    An error rolls the transaction back, and is raised even if the rollback fails too.
    """
    asyncpg = driver()
    begun = connection.transaction()
    await begun.start()
    try:
        yield
    except BaseException:
        if not connection.is_closed():
            with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                await begun.rollback()
        raise
    await (begun.commit() if keep else begun.rollback())


async def change_schema(connection: Any, statement: str) -> None:
    """Execute a CREATE or ALTER with IF NOT EXISTS. If another task makes the same change at once, the error is
    ignored."""
    log.info("changing the database", statement=statement)
    exceptions = driver().exceptions
    exists = (exceptions.DuplicateTableError, exceptions.DuplicateObjectError, exceptions.DuplicateColumnError)
    try:
        await connection.execute(statement)
    except (exceptions.IntegrityConstraintViolationError, *exists):
        log.info("another task made the same change at the same time", statement=statement)


def translated(error: Exception, *, writes: bool = False) -> Exception:
    """Return a driver's error as Penstock's: RetriableError for a temporary error, otherwise ConnectError.

    `writes` says that the transaction was not begun as read-only.
    """
    asyncpg = driver()
    if isinstance(error, RetriableError | ConnectError):
        return error
    pg = asyncpg.exceptions
    passing = (
        OSError,
        TimeoutError,
        pg.PostgresConnectionError,
        pg.InterfaceError,
        pg.OperatorInterventionError,
        pg.InsufficientResourcesError,
        pg.SerializationError,
        pg.DeadlockDetectedError,
        pg.LockNotAvailableError,
        pg.ObjectInUseError,
        pg.IdleInTransactionSessionTimeoutError,
        pg.TransactionTimeoutError,
        *((pg.ReadOnlySQLTransactionError,) if writes else ()),  # of a server that a failover made a standby
        pg.InternalClientError,  # of a connection that is closing
    )
    message = f"{type(error).__name__}: {error}"
    # asyncpg's error for invalid arguments is an InterfaceError and a ValueError. A retry would fail again.
    is_data = isinstance(error, ValueError)
    return RetriableError(message) if isinstance(error, passing) and not is_data else ConnectError(message)


def is_data_error(error: Exception) -> bool:
    """Return whether the error concerns a row's values, and not the database."""
    # Postgres has one code for all its limits. These files raise it for limits on transactions, such as a wraparound.
    if getattr(error, "server_source_filename", None) in ("varsup.c", "multixact.c", "xact.c"):
        return False
    pg = driver().exceptions
    # COPY has this code for a value of a generated column. In a statement it means that the primary key is missing.
    if isinstance(error, pg.InvalidColumnReferenceError):
        return getattr(error, "server_source_filename", None) == "copy.c"
    kinds = (
        pg.DataError,
        pg.GeneratedAlwaysError,
        pg.IntegrityConstraintViolationError,
        pg.WithCheckOptionViolationError,
        pg.ProgramLimitExceededError,  # a row or an index row that is too large
        pg.PLPGSQLError,  # of a trigger, such as RAISE EXCEPTION
    )
    # The driver raises the errors of Python if it cannot convert a value: `{}` for a point is a KeyError.
    return isinstance(error, (*kinds, ValueError, TypeError, ArithmeticError, AttributeError, LookupError))
