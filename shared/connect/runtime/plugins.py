"""The connectors, converters, transforms and predicates of a worker, and their names.

A configuration may name a plugin in four ways: the path of its class, the Kafka class that it replaces, its entry point
(group `penstock.connectors`), or the plain name of one of the two classes. For a connector, `Connector` at the end of
the plain name may be left out. REST shows the name of the Kafka class if there is one, so that existing clients of the
API keep working.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, cast

from penstock.shared.common.errors import ConfigError, MissingExtra
from penstock.shared.common.log import get_logger
from penstock.shared.common.user_modules import lacks_module
from penstock.shared.connect.allowed_files import FILES_ALLOWED, AllowedFiles
from penstock.shared.connect.builtin import BUILTIN, builtin
from penstock.shared.connect.config_def import Type, parse
from penstock.shared.connect.connector import Connector, SinkConnector, SourceConnector
from penstock.shared.connect.converter import Converter, HeaderConverter
from penstock.shared.connect.errors import ConnectorNotFound
from penstock.shared.connect.transform import Predicate, Transformation

log = get_logger(__name__)

ENTRY_POINT_GROUP = "penstock.connectors"

KINDS: dict[str, type] = {
    "sink": SinkConnector,
    "source": SourceConnector,
    "transformation": Transformation,
    "predicate": Predicate,
    "converter": Converter,
    "header_converter": HeaderConverter,
}
"""The types of plugins in REST's words, in the order in which REST lists them."""
CONNECTOR_KINDS = ("sink", "source")


@dataclass(frozen=True)
class PluginDesc:
    """One plugin as REST lists it. A class of two kinds has one entry for each kind."""

    name: str
    kind: str
    version: str
    plugin: type[Any]

    def listed(self) -> dict[str, str]:
        return {"class": self.name, "type": self.kind, "version": self.version}


def class_name(plugin: type) -> str:
    """Return the name of a plugin or task in configurations: Kafka's name for it if there is one."""
    kafka: str | None = plugin.__dict__.get("kafka_class")
    return kafka or f"{plugin.__module__}.{plugin.__qualname__}"


def plugin_version(plugin: type) -> str:
    """Return the version of a plugin, or `undefined` if its `version` fails. The failure is logged.

    `version` is called on an object whose constructor has not run, since a constructor may have side effects.
    """
    try:
        return str(cast(Any, plugin).version(object.__new__(plugin)))
    except Exception as e:
        log.warning("the version of a plugin is undefined", plugin=class_name(plugin), error=f"{type(e).__name__}: {e}")
        return "undefined"


def kinds_of(plugin: object) -> list[str]:
    """Return the kinds of a class; none if it is abstract or not a class."""
    if not isinstance(plugin, type) or inspect.isabstract(plugin):
        return []
    return [kind for kind, base in KINDS.items() if issubclass(plugin, base)]


class Plugins:
    """The plugins of a worker."""

    def __init__(self, plugins: Iterable[tuple[str | None, type]]) -> None:
        """Add plugins: pairs of an additional name, such as an entry point's, or None, and the class."""
        self._descs: list[PluginDesc] = []
        self._by_name: dict[str, dict[str, type]] = {kind: {} for kind in KINDS}
        self._data_files = AllowedFiles()
        for name, plugin in plugins:
            self.add(plugin, name)

    def __repr__(self) -> str:
        return f"<Plugins {', '.join(desc.name for desc in self._descs)}>"

    @classmethod
    def installed(cls) -> Plugins:
        """Return the plugins that ship with Penstock, and those of installed distributions.

        A plugin of Penstock is left out if its extra is not installed. A distribution's plugin that cannot be imported
        is left out and logged: it must not keep the worker from starting.
        """
        return cls([*_builtin_plugins(), *_entry_points()])

    @classmethod
    def of_worker(cls, props: Mapping[str, str]) -> Plugins:
        """Return the installed plugins, which import nothing from the allowed folders of the worker's properties."""
        plugins = cls.installed()
        plugins.import_nothing_from(AllowedFiles(parse(FILES_ALLOWED, Type.LIST, props.get(FILES_ALLOWED, ""))))
        return plugins

    def add(self, plugin: type, name: str | None = None) -> None:
        """Add a plugin under all of its names.

        If a plugin of the same kind already has one of the names, that name still refers to the earlier plugin. The new
        plugin is listed, and has its other names.
        """
        for kind in kinds_of(plugin):
            version = plugin_version(plugin)
            if not any(desc.plugin is plugin and desc.kind == kind for desc in self._descs):
                self._descs.append(PluginDesc(class_name(plugin), kind, version, plugin))
            for known in _names_of_plugin(plugin, kind, name):
                self._by_name[kind].setdefault(known, plugin)

    def import_nothing_from(self, data_files: AllowedFiles) -> None:
        """Import no class by its path from files that connectors may write: the content of a topic would be code."""
        self._data_files = data_files

    def listed(self, *, connectors_only: bool = True) -> list[dict[str, str]]:
        """Return the response to `GET /connector-plugins`: by kind, then by name."""
        order = list(KINDS)
        shown = [desc for desc in self._descs if not connectors_only or desc.kind in CONNECTOR_KINDS]
        return [desc.listed() for desc in sorted(shown, key=lambda desc: (order.index(desc.kind), desc.name))]

    def of_kind(self, kind: str) -> list[PluginDesc]:
        """Return the plugins of a kind, such as `source` or `converter`, by name."""
        return sorted((desc for desc in self._descs if desc.kind == kind), key=lambda desc: desc.name)

    def find(self, kind: str, name: str) -> type | None:
        """Return a plugin of a kind by any of its names, or by a class path that can be imported. Blanks around the
        name are ignored, as in Java. A class path is known from its import on."""
        name = name.strip()
        found = self._by_name[kind].get(name)
        if found is None and (found := _import_plugin_class(name, KINDS[kind], self._data_files)) is not None:
            self._by_name[kind][name] = found
        return found

    def any_kind(self, name: str) -> type | None:
        """Return the first plugin with this name, in the order of `KINDS`, or None. A known name imports nothing."""
        return self._known(name) or next((found for kind in KINDS if (found := self.find(kind, name))), None)

    def _known(self, name: str) -> type | None:
        return next((found for known in self._by_name.values() if (found := known.get(name.strip()))), None)

    def converter_class(self, name: str) -> type | None:
        """Return a converter of keys and values, or of headers, by name."""
        return self.find("converter", name) or self.find("header_converter", name)

    def class_of_config(self, config: Mapping[str, str]) -> type | None:
        """Return the class that `connector.class` names, or None if it is missing or not known."""
        return self.any_kind(config.get("connector.class", ""))

    def connector_class(self, name: str) -> type[Connector]:
        """Return a connector class by name. If there is none, raises ConfigError, which names the extra to
        install, or else the known connectors."""
        found = next((found for kind in CONNECTOR_KINDS if (found := self.find(kind, name)) is not None), None)
        if found is None:
            _check_extra(name)
            there = ", ".join(desc.name for kind in CONNECTOR_KINDS for desc in self.of_kind(kind))
            raise ConfigError(
                f"Failed to find any class that implements Connector and which name matches {name}, "
                f"available connectors are: {there}"
            )
        return cast(type[Connector], found)

    def config_of(self, name: str) -> tuple[type, str]:
        """Return the class of a plugin, and the first of its kinds. Raises ConnectorNotFound for an unknown name.

        Nothing is imported, since the name comes from the client of a request that only reads.
        """
        found = self._known(name)
        if found is None:
            raise ConnectorNotFound(f"Unknown plugin {name}.")
        return found, kinds_of(found)[0]

    def make(self, kind: str, name: str) -> Any:
        """Return a new instance. Raises ConfigError if there is no such plugin."""
        found = self.find(kind, name)
        if found is None:
            raise ConfigError(f"Class {name} could not be found.")
        return found()


def connector_type(plugin: type[Connector]) -> str:
    """Return the type of a connector plugin: `source` or `sink`."""
    return "source" if issubclass(plugin, SourceConnector) else "sink"


def _names_of_plugin(plugin: type, kind: str, name: str | None) -> Iterator[str]:
    if name is not None:
        yield name
    yield f"{plugin.__module__}.{plugin.__qualname__}"
    full = class_name(plugin)
    for known in {full: None, full.rpartition(".")[2]: None, plugin.__name__: None}:
        yield known
        # As in Kafka Connect, `FileStreamSource` names FileStreamSourceConnector.
        if kind in CONNECTOR_KINDS and known.endswith("Connector"):
            yield known.removesuffix("Connector").rpartition(".")[2]


def _import_plugin_class(path: str, base: type, data_files: AllowedFiles) -> type | None:
    module, _, name = path.replace(":", ".").rpartition(".")
    if not module or not all(part.isidentifier() for part in (*module.split("."), name)):
        return None
    try:
        found = getattr(_import_code(module, data_files), name, None)
    except (Exception, SystemExit) as e:
        # A module may raise any error on import, and a script exits.
        if not lacks_module(e, module):
            log.warning("a plugin's module cannot be imported", module=module, error=str(e))
        return None
    return found if isinstance(found, type) and issubclass(found, base) and not inspect.isabstract(found) else None


def _import_code(module: str, data_files: AllowedFiles) -> ModuleType:
    """Import a module, and the packages around it. Raises ImportError if one of them is in a data file or folder."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        # The import of a module runs the packages around it, so each is checked before the next one is searched.
        name = ".".join(parts[:count])
        if name in sys.modules:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        for file in (spec.origin, *(spec.submodule_search_locations or ())):
            if file is not None and data_files.contains(file):
                raise ImportError(f"{file} is data: connectors may write it ({FILES_ALLOWED})")
        importlib.import_module(name)
    return importlib.import_module(module)


def _builtin_plugins() -> Iterator[tuple[str | None, type]]:
    for public, names in BUILTIN.items():
        for name in names:
            # A connector whose extra is not installed is not listed. Its use reports the extra, see `_check_extra`.
            with suppress(MissingExtra):
                yield None, builtin(public, name)


def _check_extra(connector: str) -> None:
    """Raises ConfigError if a built-in connector has this name, and its extra is not installed."""
    for public, names in BUILTIN.items():
        for name in names:
            if connector in (f"{public}.{name}", name, name.removesuffix("Connector")):
                try:
                    builtin(public, name)
                except MissingExtra as e:
                    raise ConfigError(str(e)) from None


def _entry_points() -> Iterator[tuple[str | None, type]]:
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            plugin = entry.load()
        except (Exception, SystemExit) as e:
            # A third party's module may raise any error, and a script exits.
            log.warning("a plugin cannot be loaded", plugin=entry.name, error=f"{type(e).__name__}: {e}")
            continue
        if kinds_of(plugin):
            yield entry.name, plugin
        else:
            log.warning("not a plugin: neither connector, converter, transform nor predicate", entry_point=entry.name)
