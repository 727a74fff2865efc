"""The location of a lake, as all readers and writers interpret it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.common.errors import ConfigError
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
