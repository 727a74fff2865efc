"""Extras: errors for missing ones, and the distributions that they declare."""

from __future__ import annotations

import ast
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

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
NOT_LOADED = ("pyarrow", "deltalake", "fastapi", "numba", "pyspark")
WITHOUT = """
import sys
for module in {modules!r}: sys.modules[module] = None
"""
# These come with a declared distribution that depends on them, as pydantic with pydantic-settings and starlette with
# fastapi.
BROUGHT = {"pydantic", "starlette", "py4j", "compression"}


def run(code: str, *missing: str) -> subprocess.CompletedProcess[str]:
    """Run the code in a new Python as if these modules were not installed."""
    code = WITHOUT.format(modules=missing) + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)


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
    imported = set()
    for room in ("shared", "services", "api"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module.partition(".")[0])
    strangers = imported - sys.stdlib_module_names - {"penstock"} - BROUGHT
    declared, base = distributions("all"), distributions()
    of_module = packages_distributions()
    for module in strangers:
        names = {canonicalize_name(name) for name in of_module.get(module, [module])}
        assert names & declared, module
        assert bool(names & base) != (module in EXTRA_OF), module


@pytest.mark.parametrize(("module", "extra"), EXTRA_OF.items())
def test_the_extra_brings_the_module(module: str, extra: str) -> None:
    """Each module's extra exists in pyproject.toml and has the module's distribution."""
    names = {canonicalize_name(name) for name in packages_distributions().get(module, [module])}
    brought = {"starlette": "fastapi", "py4j": "pyspark", "pandas": "pyspark"}
    assert (names | {brought.get(module, module)}) & distributions(extra)


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


@pytest.mark.parametrize(
    ("command", "module", "message"),
    [
        ("aggregator", "pyarrow", 'penstock aggregator needs pyarrow: pip install "penstock[server,streams]"\n'),
        ("producer", "fastapi", 'penstock producer needs fastapi: pip install "penstock[server]"\n'),
        (
            "compact --lake=/nowhere --application=a",
            "pyspark",
            'penstock compact needs pyspark: pip install "penstock[spark]"\n',
        ),
    ],
)
def test_a_command_names_its_missing_extra(command: str, module: str, message: str) -> None:
    """A command without its extra prints one line on standard error and ends with status 2."""
    done = run(f"from penstock.services.cli import main\nsys.argv[1:] = {command.split()!r}\nmain()", module)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize(
    ("code", "module", "message"),
    [
        ("from penstock import StreamsBuilder", "pyarrow", 'needs pyarrow: pip install "penstock[streams]"'),
        ("import penstock.streams", "deltalake", 'needs deltalake: pip install "penstock[streams]"'),
        ("import penstock.otel", "opentelemetry", 'needs opentelemetry: pip install "penstock[otel]"'),
        ("from penstock.testing import TopologyTestDriver", "pyarrow", 'pip install "penstock[streams]"'),
    ],
)
def test_an_import_names_its_missing_extra(code: str, module: str, message: str) -> None:
    """An import without its extra is an ImportError that names the extra."""
    done = run(f"try:\n    {code}\nexcept ImportError as e:\n    print(e)", module)
    assert message in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("code", "not_loaded"),
    [
        ("import penstock", (*NOT_LOADED, "aiokafka", "numpy", "pydantic")),
        ("from penstock import Producer", NOT_LOADED),
        ("from penstock import Consumer, Admin", NOT_LOADED),
        ("import penstock.clients, penstock.connect, penstock.errors, penstock.testing", NOT_LOADED),
        ("import penstock.services.cli", (*NOT_LOADED, "aiokafka")),
        ("import penstock.services.local.kafka_command, penstock.services.local.doctor.main", NOT_LOADED),
        ("import penstock.services.connect.connectors_command, penstock.services.consumer.dlq_command", NOT_LOADED),
    ],
)
def test_the_base_loads_nothing_heavy(code: str, not_loaded: tuple[str, ...]) -> None:
    """These imports load no package of an extra."""
    done = run(f"{code}\nprint(*(m for m in {not_loaded!r} if m in sys.modules))")
    assert (done.stdout, done.stderr) == ("\n", "")
