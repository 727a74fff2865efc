"""What REST shows of a config: a value that is secret as `[hidden]`, save where it is but a variable's name.

A setting is secret by its type, or by its name where the connector defines none. Whoever reads a config, changes it and
writes it back sends `[hidden]` for what was hidden: the value that is kept stays. Of a URL its password is hidden, and
comes back with the URL as it was shown.

>>> config = {"connection.password": "s3cret", "x.token": "${env:TOKEN}", "topics": "t"}
>>> shown(config, None)
{'connection.password': '[hidden]', 'x.token': '${env:TOKEN}', 'topics': 't'}
>>> kept({**shown(config, None), "topics": "u"}, config, None)["connection.password"]
's3cret'
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from penstock.shared.connect.config_provider import VARIABLE
from penstock.shared.connect.config_types import HIDDEN, Type
from penstock.shared.connect.herder.errors import BadRequest
from penstock.shared.connect.hiding import is_secret_name, passwords_in, without_passwords

PLUGINS_MAX = 1_000
"""Plugins whose secret settings are remembered."""


@lru_cache(PLUGINS_MAX)
def _types(plugin: type) -> dict[str, Type]:
    return {key.name: key.type for key in cast(Any, plugin).config()}


def is_secret(name: str, plugin: type | None) -> bool:
    """Whether a connector's setting is not for everyone; `plugin` is its class, None where it is not known."""
    kind = None if plugin is None else _types(plugin).get(name)
    return is_secret_name(name) if kind is None else kind is Type.PASSWORD


def shown(config: Mapping[str, str], plugin: type | None) -> dict[str, str]:
    """The config as REST shows it."""
    return {name: _shown(name, value, plugin) for name, value in config.items()}


def _shown(name: str, value: str, plugin: type | None) -> str:
    if value and VARIABLE.search(value) is None and is_secret(name, plugin):
        return HIDDEN
    return without_passwords(value)


def kept(config: Mapping[str, str], before: Mapping[str, str], plugin: type | None) -> dict[str, str]:
    """The config as it is to be kept, `before` being the one that is; BadRequest where nothing was hidden."""
    found = {}
    for name, value in config.items():
        if value == HIDDEN and is_secret(name, plugin):
            if name not in before:
                raise BadRequest(f"{name}: {HIDDEN} stands for the value that is kept, and none is")
            value = before[name]
        elif HIDDEN in passwords_in(value):
            if _shown(name, before.get(name, ""), plugin) != value:
                raise BadRequest(f"{name}: {HIDDEN} stands for the password that is kept, of that URL alone: write it")
            value = before[name]
        found[name] = value
    return found
