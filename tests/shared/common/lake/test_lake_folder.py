"""The lake's folder: its location, and the files of an application's tables in it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.common.errors import ConfigError, LakeNotRemoved
from penstock.shared.common.lake.application_files import (
    ApplicationFiles,
    TableFiles,
    delete_all,
    find_files,
    remove_files,
    remove_folder,
)
from penstock.shared.common.lake.location import lake_root, table_uri


def test_a_folder_is_the_same_by_its_path_and_its_uri(tmp_path: Path) -> None:
    """Spark's jobs and deltalake's readers use the same folder for a path and its URIs."""
    folder = tmp_path / "with space-ü#1"
    for lake in (str(folder), f"{folder}/", folder.as_uri(), f"file://{folder}", f"FILE://localhost{folder}"):
        assert lake_root(lake) == str(folder)
        job = CompactSettings.load(["--application", "a", "--lake", lake], environ={})
        assert job.tables == table_uri(lake, "a") == f"{folder}/a"
    assert lake_root("file:/srv/lake") == "/srv/lake"
    assert lake_root("abfss://c@account.dfs/x/") == "abfss://c@account.dfs/x"


@pytest.mark.parametrize(
    "lake", ["s3://bucket/a%20b", "/srv/100%25", "file:///srv/100%2525", "file://host/srv", "a\0b"]
)
def test_an_ambiguous_location_is_an_error(lake: str) -> None:
    """A location that its readers interpret differently is a ConfigError at the start-up of
    jobs and of the aggregator.
    """
    with pytest.raises(ConfigError, match=r"penstock: lake: [^l]"):
        CompactSettings.load(["--application", "a", "--lake", lake], environ={})
    with pytest.raises(ConfigError, match=r"streams\.lake: "):
        AggregatorSettings.load(["--topology=a:b", "--streams.lake", lake], environ={})


def fill(lake: Path, application: str) -> None:
    for name in ("state/_delta_log/0.json", "state/a.parquet", "closed/visits/b.parquet", "late/visits/c.parquet"):
        path = lake / application / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


@pytest.mark.parametrize("as_uri", [False, True])
def test_only_the_applications_folder_is_removed(tmp_path: Path, as_uri: bool) -> None:
    """The files are counted by table and removed, at a path or a file URI, without other
    applications'; a second removal is no error.
    """
    root = tmp_path / "la ke"
    lake = root.as_uri() if as_uri else str(root)
    for application in ("app", "app-eu", "ap"):
        fill(root, application)
    tables = {
        "closed/visits": TableFiles(1, 23),
        "late/visits": TableFiles(1, 21),
        "state": TableFiles(2, 23 + 15),
    }
    assert find_files(lake, "app") == ApplicationFiles(str(root / "app"), tables)
    remove_files(lake, "app")
    assert sorted(path.name for path in root.iterdir()) == ["ap", "app-eu"]
    assert find_files(lake, "app") is None
    remove_files(lake, "app")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """An application's folder that is a symbolic link is an error, and the targets of links inside are not removed."""
    fill(tmp_path, "other")
    (tmp_path / "app").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"/app .*symbolic link"):
        find_files(str(tmp_path), "app")
    with pytest.raises(ConfigError, match=r"/app .*symbolic link"):
        remove_files(str(tmp_path), "app")
    (tmp_path / "app").unlink()
    fill(tmp_path, "app")
    (tmp_path / "app" / "link").symlink_to(tmp_path / "other")
    remove_files(str(tmp_path), "app")
    assert len([path for path in (tmp_path / "other").rglob("*") if path.is_file()]) == 4


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder inside that cannot be listed is an error, because a reset would begin to delete."""
    fill(tmp_path, "app")
    scandir = os.scandir

    def reject_state(path: Any) -> Any:
        if Path(path).name == "state":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", reject_state)
    with pytest.raises(LakeNotRemoved, match=r"app cannot be listed: .*Permission denied"):
        find_files(str(tmp_path), "app")


def test_a_file_instead_of_the_folder(tmp_path: Path) -> None:
    """A file instead of the folder is not found, and its removal is an error."""
    (tmp_path / "app").write_text("")
    assert find_files(str(tmp_path), "app") is None
    with pytest.raises(LakeNotRemoved, match=r"/app.*run it again"):
        remove_folder(tmp_path / "app")


@pytest.mark.parametrize(
    ("lake", "message"),
    [
        ("file://host/lake", "file: URI"),
        ("foo://lake", "^lake 'foo://lake/app': Unknown scheme: foo"),
    ],
)
def test_an_invalid_lake_is_an_error(lake: str, message: str) -> None:
    """A URI that cannot be opened is a ConfigError."""
    with pytest.raises(ConfigError, match=message):
        find_files(lake, "app")


def test_a_deletion_that_fails_is_named() -> None:
    """The error of a failed deletion has the first failed object and the number of deleted ones, wherever they are."""
    gone: list[str] = []
    all_others = threading.Event()

    def delete(path: str) -> None:
        if path == "c":
            assert all_others.wait(10)
            raise OSError("Generic S3 error\n  \x1b[31m↳\x1b[0m 403 Forbidden")
        gone.append(path)
        if len(gone) == 3:
            all_others.set()

    message = "^s3://lake/app/c .*403 Forbidden.*3 of 4"
    with pytest.raises(LakeNotRemoved, match=message):
        delete_all("s3://lake/app", ["a", "b", "c", "d"], delete)
    assert set(gone) == {"a", "b", "d"}
