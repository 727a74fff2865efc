"""Finding and removing the files of an application's tables."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock.shared.common.errors import ConfigError, LakeNotRemoved
from penstock.shared.common.lake.application_files import (
    ApplicationFiles,
    TableFiles,
    delete_all,
    find_files,
    remove_files,
    remove_folder,
)


def fill(lake: Path, application: str) -> None:
    for name in ("state/_delta_log/0.json", "state/a.parquet", "closed/visits/b.parquet"):
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
    tables = {"closed/visits": TableFiles(1, 23), "state": TableFiles(2, 23 + 15)}
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
    assert len([path for path in (tmp_path / "other").rglob("*") if path.is_file()]) == 3


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
