"""The public modules: their names, the module that their classes report, and that documents use no other module."""

from __future__ import annotations

import gzip
import importlib
import inspect
import pickle
import re
import runpy
import subprocess
import sys
import typing
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest

import penstock
from penstock.shared.common import errors
from penstock.shared.connect.builtin import BUILTIN
from tests.documents import ROOT, blocks
from tests.forked_imports import ran_in_forks

MODULES = ("clients", "connect", "errors", "otel", "spark", "streams", "testing")

ALL_MODULES = ["penstock", *(f"penstock.{name}" for name in MODULES), "penstock.testing.oracle", *BUILTIN]
SHARED = "import aiokafka, deltalake, httpx, msgspec, numba, prometheus_client, pyarrow, pydantic_settings, structlog"
"""The dependencies that several public modules import."""
INSPECT = """
import importlib, json, sys
assert not any(module.partition(".")[0] == "penstock" for module in sys.modules)
module = importlib.import_module({!r})
print(json.dumps([module.__all__, [name for name in dir(module) if not name.startswith("_")]]))
"""


@pytest.fixture(scope="module")
def inspected() -> dict[str, str]:
    """What each public module lists and has, after it was imported alone."""
    return dict(zip(ALL_MODULES, ran_in_forks(SHARED, *map(INSPECT.format, ALL_MODULES)), strict=True))


@pytest.mark.parametrize("module", ALL_MODULES)
def test_a_public_module_imports_alone_and_lists_its_names(module: str, inspected: dict[str, str]) -> None:
    """A public module imports before any other of Penstock; its `__all__` has no duplicates and equals `dir`."""
    names, shown = msgspec.json.decode(inspected[module])
    assert len(set(names)) == len(names)
    assert set(shown) == {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("module", MODULES)
def test_classes_and_functions_name_a_public_module(module: str) -> None:
    """Public classes and functions report a public module, are pickled by that name, and their annotations resolve."""
    public = importlib.import_module(f"penstock.{module}")
    for name in public.__all__:
        each = getattr(public, name)
        if not (inspect.isclass(each) or inspect.isfunction(each)):
            continue  # an instance or a type alias has no module
        assert each.__module__ in ({f"penstock.{module}"} | ({"penstock.errors"} if module == "connect" else set()))
        assert getattr(importlib.import_module(each.__module__), name) is each
        assert pickle.loads(pickle.dumps(each)) is each
        if inspect.isclass(each):
            assert typing.get_type_hints(each) is not None


def test_all_errors_are_public() -> None:
    """`penstock.errors` contains exactly the errors of `penstock.shared.common.errors`."""
    defined = {name for name, each in vars(errors).items() if isinstance(each, type)}
    assert defined == set(_names("errors"))


def test_the_version_is_the_distributions() -> None:
    """`penstock.__version__` is the distribution's version, and is looked up lazily."""
    assert penstock.__version__ == version("penstock")
    assert "__version__" not in vars(penstock)


def test_python_m_penstock_is_the_command() -> None:
    """`python -m penstock` runs the command."""
    ran = subprocess.run(
        [sys.executable, "-m", "penstock", "--version"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, f"penstock {version('penstock')}\n"), ran.stderr


def test_recorded_cases_are_replayed_by_the_public_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m penstock.testing.oracle` replays a file of cases and counts them."""
    with gzip.open(ROOT / "tests/data/kafka_streams.jsonl.gz", "rb") as lines:
        (tmp_path / "cases.jsonl").write_bytes(lines.readline())
    monkeypatch.setattr(sys, "argv", ["oracle", str(tmp_path / "cases.jsonl")])
    monkeypatch.delitem(sys.modules, "penstock.testing.oracle", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("penstock.testing.oracle", run_name="__main__", alter_sys=True)
    assert (ended.value.code, capsys.readouterr().out) == (0, "1 passed, 0 failed\n")


def private_imports(code: str) -> list[str]:
    """The lines that import private modules."""
    private = re.compile(
        r"^\s*(?:>>> )?(?:from|import) +penstock(?:\.| +import +)(?:shared|services|api)\b.*$", re.MULTILINE
    )
    return [found[0].strip() for found in private.finditer(code)]


def test_documents_and_examples_use_public_modules_alone() -> None:
    """Code in documents and examples imports no private module."""
    assert private_imports("from penstock.shared.x import y\n    import penstock.api\nfrom penstock import api\n")
    assert not private_imports("from penstock.clients import Producer\nimport penstock\n")
    code = {str(path): path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        code[str(document)] = "\n".join(blocks(document) + blocks(document, "pycon"))
    assert {name: found for name, text in code.items() if (found := private_imports(text))} == {}
    assert any("penstock" in text for text in code.values())


def _names(module: str) -> list[str]:
    names: list[str] = importlib.import_module(f"penstock.{module}").__all__
    return names
