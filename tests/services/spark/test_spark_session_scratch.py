"""The scratch folders of jobs."""

from __future__ import annotations

from pathlib import Path

from penstock.services.spark.spark_session import SCRATCH_LOCK, SCRATCH_PREFIX, remove_abandoned, scratch_folder


def test_a_folder_goes_with_its_job(tmp_path: Path) -> None:
    """A folder in use and a folder that is still being made by another job are not removed."""
    made = tmp_path / f"{SCRATCH_PREFIX}made"
    made.mkdir()
    with scratch_folder(tmp_path) as work:
        assert remove_abandoned(tmp_path) == []
        with scratch_folder(tmp_path) as other:
            assert Path(work).is_dir()
            assert other != work
    assert list(tmp_path.iterdir()) == [made]


def test_what_a_killed_job_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """The folder's lock is free, so the folder is removed with its content. A symbolic link is left alone."""
    left, elsewhere = tmp_path / f"{SCRATCH_PREFIX}left", tmp_path / "elsewhere"
    for folder in (left, elsewhere):
        (folder / "blockmgr").mkdir(parents=True)
        (folder / SCRATCH_LOCK).touch()
    link = tmp_path / f"{SCRATCH_PREFIX}link"
    link.symlink_to(elsewhere)
    with scratch_folder(tmp_path):
        assert not left.exists()
    assert sorted(tmp_path.iterdir()) == [elsewhere, link]
    assert (elsewhere / "blockmgr").is_dir()
