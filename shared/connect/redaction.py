"""Redaction: configs, log lines and errors show `[hidden]` in place of secrets.

The type of a setting decides whether the setting is secret. If the type is not known, as in most log lines, the name
of the setting decides. A URL is shown without its password. A value that consists only of variables such as
`${env:TOKEN}` is not a secret.

A client may read a config over REST, change it and write it back. Then `[hidden]` stands for the stored secret, which
stays in force.

>>> hidden("connection.password", "s3cret"), hidden("tasks.max", "1")
('[hidden]', '1')
>>> without_passwords("postgresql://ann:s3cret@db/shop?sslmode=require&sslpassword=s3cret")
'postgresql://ann:[hidden]@db/shop?sslmode=require&sslpassword=[hidden]'
>>> config = {"connection.password": "s3cret", "x.token": "${env:TOKEN}", "topics": "t"}
>>> redacted(config, None)
{'connection.password': '[hidden]', 'x.token': '${env:TOKEN}', 'topics': 't'}
>>> restored({**redacted(config, None), "topics": "u"}, config, None)["connection.password"]
's3cret'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol, cast

from penstock.shared.connect.config_def import HIDDEN, Password, Type
from penstock.shared.connect.errors import BadRequest

SECRET_WORDS = (
    *("password", "secret", "token", "jaas.config", "credential", "api.key", "basic.auth.user.info"),
    *("ssl.keystore.key", "http.headers", "authorization"),
    *("account_key", "account.key", "access_key", "access.key", "sas_key", "connection_string"),
    *("master_key", "master.key", "sse_customer_key", "sse.customer.key"),
)
"""A setting that the connector does not define is secret if its name contains one of these."""
IDENTIFIERS = re.compile(r"access[_.]key[_.]id$")
"""The end of a name whose setting is not secret, unless the rest of the name contains a secret word."""
PLUGINS_MAX = 1_000
"""How many plugins' types of settings are cached."""
_VARIABLE = re.compile(r"\$\{(?=[^}:])(?:([^}:]+):(?:([^}]*):)?([^}:]*)\}|[^}]*\}?)")
"""A variable of a config, `${provider:[path:]key}`, or a text from `${` to the next `}` or to the end that is none.

In the second case the first group is None. Such a text is matched too, since a search that began at each `${` in it
would take quadratic time.
"""
_ANY_VARIABLE = r"\$\{[^{}]*\}"
_DOLLAR = rf"(?!{_ANY_VARIABLE})\$"
# A ":" or "/" in a variable separates nothing: `http://${env:USER}:${file:/secrets:key}@host`. Elsewhere a variable is
# matched as a whole, since a search that began in each of them would take quadratic time.
_USER_INFO = re.compile(
    rf"(?<=://)((?:{_ANY_VARIABLE}|{_DOLLAR}|[^\s:/?#@$])*):((?:{_ANY_VARIABLE}|{_DOLLAR}|[^\s/?#$])+)@|{_ANY_VARIABLE}"
)
_SECRET_WORD = "(?:password|passwd|pwd|secret|token|credential|signature|api[._\\-]?key|access[._\\-]?key)"  # noqa: S105
# The part before the first secret word is possessive: a name with many of these words would take quadratic time.
_PARAMETER = re.compile(
    rf"([?&;](?:(?:(?!{_SECRET_WORD})[\w.\-])*+{_SECRET_WORD}[\w.\-]*|sig)=)([^&;#\s]+)", re.IGNORECASE
)


class Mask(Protocol):
    """Redacts a text: takes the secrets of a configuration out of it."""

    def __call__(self, text: str, name: str = "") -> str:
        """Return the text with the secrets masked. `name` is the setting that the text is about, or "" if there is
        none. A very short secret is masked only in a text about its own setting."""
        ...


def unmasked(text: str, name: str = "") -> str:
    """Return the text unchanged: a mask without redaction."""
    return text


def is_secret_name(name: str) -> bool:
    """Return whether a setting is secret, judged by its name alone."""
    rest = IDENTIFIERS.sub("", name.lower())
    return any(word in rest for word in SECRET_WORDS)


def hidden(name: str, value: Any) -> Any:
    """Return a property's value in a form that may be logged."""
    if isinstance(value, Password) or is_secret_name(name):
        return HIDDEN if value is not None else None
    return without_passwords(value) if isinstance(value, str) else value


def without_passwords(text: str) -> str:
    """Return the text with `[hidden]` in place of each password in its URLs. A variable as the password is kept.

    >>> without_passwords("jdbc:postgresql://db/shop?user=ann&password=${env:PASSWORD}")
    'jdbc:postgresql://db/shop?user=ann&password=${env:PASSWORD}'
    """
    return _replace_passwords(text, lambda password: HIDDEN if _has_literal_text(password) else password)


def variables_in(text: str) -> list[re.Match[str]]:
    """Return the variables `${provider:[path:]key}` of a text. Their groups are the provider, path and key.

    >>> [found.groups() for found in variables_in("${env:A}/${file:/a:b:C} ${D} ${env:E")]
    [('env', None, 'A'), ('file', '/a:b', 'C')]
    """
    return [found for found in _VARIABLE.finditer(text) if found[1]]


def replace_variables(text: str, replace: Callable[[re.Match[str]], str]) -> str:
    """Return the text with each of its variables replaced."""
    return _VARIABLE.sub(lambda found: replace(found) if found[1] else found[0], text)


def secrets_in(name: str, value: str, plugin: type | None) -> dict[str, str]:
    """Map each text of a setting's value that must not be shown to the text that is shown instead.

    This is the whole value if it is a secret, else each password in its URLs and the value with these passwords.
    """
    if (shown := redacted_value(name, value, plugin)) == value:
        return {}
    if shown == HIDDEN:
        return dict.fromkeys((value, value.strip()), shown)
    return {value: shown, **{password: HIDDEN for password in passwords_in(value) if _has_literal_text(password)}}


def passwords_in(text: str) -> list[str]:
    """Return the passwords in a text's URLs.

    >>> passwords_in("http://ann:[hidden]@api/items?api_key=k3y&page=1")
    ['[hidden]', 'k3y']
    """
    found: list[str] = []

    def keep(password: str) -> str:
        found.append(password)
        return password

    _replace_passwords(text, keep)
    return found


def _replace_passwords(text: str, replace: Callable[[str], str]) -> str:
    """Return the text with each password in its URLs replaced."""
    if "://" not in text:
        return text

    def replace_in_user_info(found: re.Match[str]) -> str:
        if found[2] is None:
            # A variable may contain a URL, but no other variable.
            return "$" + _USER_INFO.sub(replace_in_user_info, found[0][1:])
        return f"{found[1]}:{replace(found[2])}@"

    text = _USER_INFO.sub(replace_in_user_info, text)
    return _PARAMETER.sub(lambda found: found[1] + replace(found[2]), text)


def _has_literal_text(value: str) -> bool:
    """Return whether a value has text, other than white space, that is not part of a variable."""
    return bool(replace_variables(value, lambda _: "").strip())


@lru_cache(PLUGINS_MAX)
def _config_types_of_plugin(plugin: type) -> dict[str, Type]:
    return {key.name: key.type for key in cast(Any, plugin).config()}


def defining(plugin: type | None) -> type | None:
    """Return the plugin, or None if its definition of settings raises an error."""
    if plugin is None:
        return None
    try:
        _config_types_of_plugin(plugin)
    except (Exception, SystemExit):
        return None
    return plugin


def is_secret(name: str, plugin: type | None) -> bool:
    """Return whether a connector's setting is secret. `plugin` is the connector's class, or None if it is not known."""
    kind = None if plugin is None else _config_types_of_plugin(plugin).get(name)
    return is_secret_name(name) if kind is None else kind is Type.PASSWORD


def redacted(config: Mapping[str, str], plugin: type | None) -> dict[str, str]:
    """Return the config as REST shows it. All values are hidden if the plugin cannot define its settings."""
    if defining(plugin) is not plugin:
        # It is not known which settings are secrets.
        return dict.fromkeys(config, HIDDEN)
    return {name: redacted_value(name, value, plugin) for name, value in config.items()}


def redacted_value(name: str, value: str, plugin: type | None = None) -> str:
    """Return a setting's value as REST shows it."""
    return HIDDEN if _has_literal_text(value) and is_secret(name, plugin) else without_passwords(value)


def restored(config: Mapping[str, str], before: Mapping[str, str], plugin: type | None) -> dict[str, str]:
    """Return the config with the `[hidden]` of each secret replaced by the stored value in `before`.

    Raises BadRequest if `before` has no such value, or if the URL around a hidden password was changed.
    """
    found = {}
    for name, value in config.items():
        if value == HIDDEN and is_secret(name, plugin):
            if name not in before:
                raise BadRequest(f"{name}: {HIDDEN} keeps the stored value, but none is stored")
            value = before[name]
        # Only for the same URL. Otherwise a client could have the stored password sent to a host of its choice.
        elif HIDDEN in passwords_in(value):
            if redacted_value(name, before.get(name, ""), plugin) != value:
                raise BadRequest(f"{name}: {HIDDEN} keeps the stored password only for the same URL: set the password")
            value = before[name]
        found[name] = value
    return found
