"""The folder of an instance's state: one owner, and clear words where it cannot be had."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.state.state_directory import StateDirectory


def directory(folder: Path) -> StateDirectory:
    return StateDirectory(str(folder), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    """A second instance is rejected with the setting's name, and can use the folder after the first has closed it."""
    first, second = directory(tmp_path), directory(tmp_path)
    first.acquire()
    with pytest.raises(ConfigError, match=rf"streams.state_dir.*{tmp_path}/app.*locked"):
        second.acquire()
    first.release()
    first.release()
    second.acquire()
    assert repr(second) == f"<StateDirectory {tmp_path}/app locked>"
    second.release()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A path that is no folder, or cannot be created, is rejected with the path and the system's reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"streams.state_dir.*file/app.*Not a directory"):
        directory(tmp_path / "file").acquire()


def test_without_the_extra_it_is_said_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If rocksdict is not installed, the error names the setting and the extra."""
    for module in ("local_state", "rocksdb"):
        monkeypatch.delitem(sys.modules, f"penstock.shared.streams.state.{module}", raising=False)
        package = sys.modules["penstock.shared.streams.state"]
        monkeypatch.delattr(package, module, raising=False)
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with pytest.raises(ConfigError, match=r"default_dsl_store: .*rocksdict: .*penstock\[rocksdb\]"):
        directory(tmp_path)


def test_each_partition_has_a_database_of_its_own(tmp_path: Path) -> None:
    """Partitions are folders below the application's folder. Other entries there are ignored."""
    own = directory(tmp_path)
    own.acquire()
    states = [own.state_of(partition) for partition in (3, 11)]
    assert own.partitions() == [3, 11]
    for state in states:
        state.close()
    own.release()


def test_what_is_not_used_any_more_is_deleted(tmp_path: Path) -> None:
    """A partition's folder is deleted if it was not open for the delay. An open or recently used one stays."""
    own = directory(tmp_path)
    own.acquire()
    states = {partition: own.state_of(partition) for partition in (1, 2, 3)}
    states[1].close()
    states[2].close()
    closed_ms = (tmp_path / "app" / "2").stat().st_mtime * 1000
    os.utime(tmp_path / "app" / "1", (closed_ms / 1000 - 60, closed_ms / 1000 - 60))
    assert own.clean(30_000, int(closed_ms) + 1_000) == [1]
    assert own.partitions() == [2, 3]
    assert own.clean(30_000, int(closed_ms) + 60_000) == [2]
    assert (own.clean(30_000, int(closed_ms) + 60_000), own.partitions()) == ([], [3])
    states[3].close()
    own.release()
