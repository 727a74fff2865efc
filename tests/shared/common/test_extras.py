"""Extras: errors for missing ones, and the distributions that they declare."""

from __future__ import annotations

import functools
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock.services.cli import COMMANDS
from penstock.shared.common.errors import ConfigError, MissingExtra
from penstock.shared.common.extras import EXTRA_OF, needs
from tests.source_imports import imported_modules

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
NOT_LOADED = ("backports", "pyarrow", "deltalake", "fastapi", "numba", "pyspark")
WITHOUT = """
from contextlib import contextmanager

@contextmanager
def without(module):
    sys.modules[module] = None
    yield
    del sys.modules[module]
"""
# These come with a declared distribution that depends on them, as pydantic with pydantic-settings and starlette with
# fastapi.
BROUGHT = {"pydantic", "starlette", "py4j", "compression"}


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run the code in a new Python. `with without(module):` runs code as if the module were not installed.

    The garbage collector would be half of the time of the imports.
    """
    command = [sys.executable, "-c", f"import gc, sys\ngc.disable()\n{WITHOUT}{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


packages = functools.cache(packages_distributions)


def distributions_of(module: str) -> set[str]:
    """The canonical names of the distributions that have a module."""
    return {canonicalize_name(name) for name in packages().get(module, [module])}


def distributions(*extras: str) -> set[str]:
    """The distributions of the base and these extras, including extras that they refer to."""
    found, todo = set(), [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    while todo:
        requirement = Requirement(todo.pop())
        if requirement.name == "penstock":
            todo += [line for extra in requirement.extras for line in EXTRAS[extra]]
        else:
            found.add(canonicalize_name(requirement.name))
    return found


def test_all_is_every_extra() -> None:
    """The extra `all` names every other one."""
    (every,) = map(Requirement, EXTRAS["all"])
    assert every.extras == EXTRAS.keys() - {"all"}


def test_every_module_that_is_imported_is_declared() -> None:
    """The distribution of each imported module is declared, in the base if it is in no extra."""
    imported = imported_modules(*(ROOT / room for room in ("shared", "services", "api")))
    strangers = imported - sys.stdlib_module_names - {"penstock"} - BROUGHT
    declared, base = distributions("all"), distributions()
    for module in strangers:
        names = distributions_of(module)
        assert names & declared, module
        assert bool(names & base) != (module in EXTRA_OF), module


@pytest.mark.parametrize(("module", "extra"), EXTRA_OF.items())
def test_the_extra_brings_the_module(module: str, extra: str) -> None:
    """Each module's extra exists in pyproject.toml and has the module's distribution."""
    brought = {"starlette": "fastapi", "py4j": "pyspark", "pandas": "pyspark"}
    assert (distributions_of(module) | {brought.get(module, module)}) & distributions(extra)


def test_commands_name_existing_extras() -> None:
    """The extras of each command exist in pyproject.toml."""
    assert {extra for *_, extras in COMMANDS.values() for extra in extras} <= EXTRAS.keys()


def test_a_module_of_no_extra_stays_missing() -> None:
    """A missing module that belongs to no extra is an ordinary ModuleNotFoundError."""
    with pytest.raises(ModuleNotFoundError) as caught, needs("penstock consumer", "server"):
        import nowhere_at_all  # type: ignore[import-not-found]  # noqa: F401
    assert not isinstance(caught.value, MissingExtra)


def test_a_missing_extra_is_an_import_error_and_a_config_error() -> None:
    """MissingExtra is an ImportError and a ConfigError."""
    assert issubclass(MissingExtra, ImportError)
    assert issubclass(MissingExtra, ConfigError)


def test_a_command_names_its_missing_extra() -> None:
    """A command without its extra prints one line on standard error and ends with status 2."""
    expected = {
        ("aggregator", "pyarrow"): 'penstock aggregator needs pyarrow: pip install "penstock[server,streams]"\n',
        ("producer", "fastapi"): 'penstock producer needs fastapi: pip install "penstock[server]"\n',
        ("compact --lake=/nowhere --application=a", "pyspark"): (
            'penstock compact needs pyspark: pip install "penstock[spark]"\n'
        ),
    }
    done = run(f"""
from penstock.services.cli import main
for command, module in {list(expected)!r}:
    with without(module):
        sys.argv[1:] = command.split()
        try:
            main()
        except SystemExit as e:
            print(e.code)
""")
    assert (done.stdout, done.stderr) == ("2\n" * len(expected), "".join(expected.values()))


def test_an_import_names_its_missing_extra() -> None:
    """An import without its extra is an ImportError that names the extra."""
    expected = {
        ("from penstock import StreamsBuilder", "pyarrow"): 'needs pyarrow: pip install "penstock[streams]"',
        ("from penstock.testing import TopologyTestDriver", "pyarrow"): 'pip install "penstock[streams]"',
        ("import penstock.streams", "deltalake"): 'needs deltalake: pip install "penstock[streams]"',
        ("import penstock.otel", "opentelemetry"): 'needs opentelemetry: pip install "penstock[otel]"',
    }
    done = run(f"""
for code, module in {list(expected)!r}:
    with without(module):
        try:
            exec(code)
        except ImportError as e:
            print(e)
""")
    errors = done.stdout.splitlines()
    assert len(errors) == len(expected), done.stderr
    assert [m for m, error in zip(expected.values(), errors, strict=True) if m not in error] == [], errors


def test_the_base_loads_nothing_heavy() -> None:
    """No module of the base loads a package of an extra, and the command loads no client."""
    done = run(f"""
import penstock.services.cli
print("aiokafka" in sys.modules)
import penstock.clients, penstock.connect, penstock.errors, penstock.testing
from penstock.connect.connectors import HttpSinkConnector, HttpSourceConnector
from penstock.connect.converters import JsonSchemaConverter
import penstock.services.local.kafka_command, penstock.services.local.doctor.main
import penstock.services.connect.connectors_command, penstock.services.consumer.dlq_command
print([module for module in {NOT_LOADED!r} if module in sys.modules])
""")
    assert (done.stdout, done.stderr) == ("False\n[]\n", "")
