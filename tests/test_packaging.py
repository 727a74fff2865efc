"""The wheel, built from this checkout without a network: it contains all files of the package and no others."""

from __future__ import annotations

import ast
import configparser
import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("shared", "services", "api")
"""Folders of the checkout that the package `penstock` contains as symlinks."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that is built from the checkout."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def build_wheel(source: Path, folder: Path) -> zipfile.ZipFile:
    build(source, folder, "wheel")
    (path,) = folder.glob("penstock-*.whl")
    return zipfile.ZipFile(path)


def build(source: Path, folder: Path, target: str) -> None:
    """Build a wheel or an sdist. pip would call the same builder; tests/integration installs with pip."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


def metadata_file(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (n for n in wheel.namelist() if n.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return email.message_from_string(metadata_file(wheel, "METADATA"))


def tracked() -> list[str]:
    """The package's files that git tracks or would add, without symlinks."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "penstock", *ROOMS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def packed(wheel: zipfile.ZipFile) -> dict[str, bytes]:
    return {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}


def test_wheel_holds_the_package_alone(wheel: zipfile.ZipFile) -> None:
    """The wheel contains the modules, py.typed and the API's static files below `penstock/`, and nothing else."""
    expected = {
        name if name.startswith("penstock/") else f"penstock/{name}": (ROOT / name).read_bytes() for name in tracked()
    }
    assert packed(wheel).keys() == expected.keys()
    assert packed(wheel) == expected


def test_wheel_from_the_source_distribution_is_the_same(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """A wheel that is built from the sdist has the same files."""
    build(ROOT, tmp_path, "sdist")
    (sdist,) = tmp_path.glob("penstock-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    (source,) = (path for path in tmp_path.glob("penstock-*") if path.is_dir())
    assert packed(build_wheel(source, tmp_path)) == packed(wheel)


def test_wheel_is_typed(wheel: zipfile.ZipFile) -> None:
    """The wheel contains py.typed, so type checkers use the annotations."""
    assert "penstock/py.typed" in wheel.namelist()


def test_every_package_has_an_init_file() -> None:
    """Every folder with modules has an __init__.py, since many tools do not find namespace packages."""
    folders = {path.parent for room in ("penstock", *ROOMS) for path in (ROOT / room).rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_command_line_is_an_entry_point(wheel: zipfile.ZipFile) -> None:
    """The wheel installs the command `penstock`, and contains the function that it calls."""
    entry_points = configparser.ConfigParser()
    entry_points.read_string(metadata_file(wheel, "entry_points.txt"))
    assert dict(entry_points["console_scripts"]) == {"penstock": "penstock.services.cli:main"}
    module, _, function = entry_points["console_scripts"]["penstock"].partition(":")
    tree = ast.parse(wheel.read(f"{module.replace('.', '/')}.py"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_metadata_is_that_of_pyproject(metadata: Message) -> None:
    """Name, version, minimum Python, dependencies and extras are those in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (metadata["Name"], metadata["Version"]) == (project["name"], project["version"])
    assert metadata["Requires-Python"] == project["requires-python"]
    assert metadata.get_all("Provides-Extra", []) == sorted(project["optional-dependencies"])
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(required) == len(project["dependencies"])


def test_license_is_packed(wheel: zipfile.ZipFile, metadata: Message) -> None:
    """The wheel names the licence by its SPDX identifier and contains its full text."""
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata_file(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("package", "least", "needed_for"),
    [
        ("deltalake", "1.6.6", "deltalake.transaction.RemoveAction"),
        ("prometheus-client", "0.24", "remove_by_labels"),
        ("pydantic-settings", "2.9", "pydantic_settings.exceptions"),
    ],
)
def test_a_dependency_has_what_is_used(package: str, least: str, needed_for: str) -> None:
    """The lowest version that pyproject.toml allows is not below the first with the name that is used."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(line for lines in extras for line in lines)]
    (requirement,) = {Requirement(line) for line in wanted if Requirement(line).name == package}
    lowest = min(Version(one.version) for one in requirement.specifier if one.operator == ">=")
    assert lowest >= Version(least), needed_for


def test_lock_covers_every_dependency() -> None:
    """Every dependency of pyproject.toml, also of extras and for development, is pinned in the lock with a hash."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = pyproject["project"]["dependencies"] + pyproject["dependency-groups"]["dev"]
    wanted += [line for lines in pyproject["project"]["optional-dependencies"].values() for line in lines]
    names = {re.match(r"[\w.-]+", entry)[0].lower().replace("_", "-") for entry in wanted}  # type: ignore[index]
    blocks = (ROOT / "requirements.lock").read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    assert names - {"penstock"} <= {block.partition("==")[0] for block in blocks}
    assert all("--hash=sha256:" in block for block in blocks)
