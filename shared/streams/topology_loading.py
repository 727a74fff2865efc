"""Loads a user's topology, or another function, by its name `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.user_modules import add_to_search_path
from penstock.shared.streams.topology import Topology

NAME_PATTERN = r"^\w[\w.]*:\w+$"


def load_function(name: str, setting: str, folder: str | None = None) -> Callable[..., Any]:
    """Load the function that returns a topology, or another one of the user, by its name `module:function`.

    Raises ConfigError, which names the setting, for an ImportError, or if the module lacks the function. Any other
    error of the module's code is raised unchanged.
    """
    module, _, function = name.partition(":")
    add_to_search_path(folder)
    try:
        imported = importlib.import_module(module)
    except ImportError as e:
        raise ConfigError(f"{setting}: {name}: {e}") from e
    try:
        found: Callable[..., Any] = getattr(imported, function)
    except AttributeError as e:
        raise ConfigError(f"{setting}: {name}: {e}") from e
    return found


def load_topology(name: str, options: Mapping[str, str], folder: str | None = None) -> Topology:
    """Call `module:function` with `options`, and return its topology. Raises ConfigError if it returns no topology.

    `folder` is added to Python's path, so that the user's module is found there; the default is the current folder.
    Raises ConfigError too as `load_function`, and for a TypeError of the call.
    """
    build = load_function(name, "topology", folder)
    try:
        topology = build(**options)
    except TypeError as e:
        raise ConfigError(f"topology: {name}: {e}") from e
    if not isinstance(topology, Topology):
        raise ConfigError(f"topology: {name} returned {type(topology).__name__}, not a Topology")
    return topology
