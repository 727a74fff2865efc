"""What of a setting may be shown: not the value of one that is secret by its name, nor a password within a URL.

>>> hidden("connection.password", "s3cret"), hidden("tasks.max", "1")
('[hidden]', '1')
>>> without_passwords("postgresql://ann:s3cret@db/shop?sslmode=require&sslpassword=s3cret")
'postgresql://ann:[hidden]@db/shop?sslmode=require&sslpassword=[hidden]'
"""

from __future__ import annotations

import re
from typing import Any

from penstock.shared.connect.config_types import HIDDEN, Password

SECRET_WORDS = (
    *("password", "secret", "token", "jaas.config", "credential", "api.key", "basic.auth.user.info"),
    *("ssl.keystore.key", "http.headers", "authorization"),
)
"""A property whose name has one of these is never shown with its value."""
VARIABLE_BEGINS = "${"
USER_INFO = re.compile(r"(?<=://)([^\s:/?#@]*):([^\s/?#]+)@")
PARAMETER = re.compile(
    r"([?&;][\w.\-]*(?:password|passwd|pwd|secret|token|credential|signature|api[._\-]?key|access[._\-]?key)[\w.\-]*=)"
    r"([^&;#\s]+)",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Whether a setting is secret, of which nothing but its name is known."""
    return any(word in name.lower() for word in SECRET_WORDS)


def hidden(name: str, value: Any) -> Any:
    """A property's value as it may be logged."""
    if isinstance(value, Password) or is_secret_name(name):
        return HIDDEN if value is not None else None
    return without_passwords(value) if isinstance(value, str) else value


def without_passwords(text: str) -> str:
    """The text without what its URLs give as passwords; a variable's name is none.

    >>> without_passwords("jdbc:postgresql://db/shop?user=ann&password=${env:PASSWORD}")
    'jdbc:postgresql://db/shop?user=ann&password=${env:PASSWORD}'
    """
    if "://" not in text:
        return text
    return PARAMETER.sub(_without, USER_INFO.sub(lambda found: f"{_user(found)}@", text))


def secrets_in(name: str, value: str) -> dict[str, str]:
    """What is not to stand in any text, each with what is shown for it: the value, or the passwords of its URLs."""
    if not value or (shown := hidden(name, value)) == value:
        return {}
    if shown == HIDDEN:
        return {value: shown, repr(value)[1:-1]: shown}
    return {value: shown, **{password: HIDDEN for password in passwords_in(value) if VARIABLE_BEGINS not in password}}


def passwords_in(text: str) -> list[str]:
    """What a text's URLs have where a password belongs.

    >>> passwords_in("http://ann:[hidden]@api/items?api_key=k3y&page=1")
    ['[hidden]', 'k3y']
    """
    return [found[2] for pattern in (USER_INFO, PARAMETER) for found in pattern.finditer(text)] if "://" in text else []


def _user(found: re.Match[str]) -> str:
    return f"{found[1]}:{found[2] if VARIABLE_BEGINS in found[2] else HIDDEN}"


def _without(found: re.Match[str]) -> str:
    return found[0] if VARIABLE_BEGINS in found[2] else f"{found[1]}{HIDDEN}"
