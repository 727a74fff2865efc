"""The settings of the jobs: masters, retentions, defaults and Java client properties."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.services.exit_status import ExitStatus
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.services.spark.main import audit_main, compact_main
from penstock.shared.common.errors import ConfigError

NEEDED = ["--application", "banks", "--lake", "lake"]


@pytest.mark.parametrize(
    "master", ["local", "local[*]", "local[2,3]", "spark://a:7077,b:7077", "yarn", "k8s://https://h"]
)
def test_where_spark_may_run(master: str) -> None:
    """Every master that Spark's launcher accepts is valid. For any other, Spark would print a stack trace."""
    assert CompactSettings.load([*NEEDED, "--spark.master", master], environ={}).spark.master == master
    with pytest.raises(ConfigError, match=r"spark\.master: "):
        CompactSettings.load([*NEEDED, "--spark.master", f"x{master}"], environ={})


@pytest.mark.parametrize("master", ["spark://a", "spark://a:7077,b", "spark://", "local[]"])
def test_a_standalone_master_has_a_port(master: str) -> None:
    """An address without a port could never be reached."""
    with pytest.raises(ConfigError, match=r"spark\.master: "):
        CompactSettings.load([*NEEDED, "--spark.master", master], environ={})


@pytest.mark.parametrize("application", ["..", ".", "a/b", "a b", "a" * 201, ""])
def test_an_application_id_is_the_aggregators(application: str) -> None:
    """A job accepts the ids that the aggregator accepts. Others could name another folder of the lake."""
    with pytest.raises(ConfigError, match=r"application: "):
        CompactSettings.load([f"--application={application}", "--lake", "lake"], environ={})


def test_a_retention_before_the_calendar_is_rejected() -> None:
    """A retention that reaches before the calendar's beginning is rejected by its name, before anything is written."""
    assert (
        CompactSettings.load([*NEEDED, "--closed-retention-days=100000"], environ={}).closed_retention_days == 100_000
    )
    with pytest.raises(ConfigError, match=r"closed_retention_days: "):
        CompactSettings.load([*NEEDED, "--closed-retention-days=999999"], environ={})


def test_flags_variables_and_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The changelog's name is derived from the application's. Spark's settings can be a JSON object in a variable."""
    monkeypatch.chdir(tmp_path)
    environ = {"PENSTOCK_SPARK__CONF": '{"spark.hadoop.fs.s3a.endpoint": "http://s3"}'}
    settings = CompactSettings.load([*NEEDED, "--delete-covered", "--spark.conf", "a=b"], environ=environ)
    assert (settings.changelog_topic, settings.delete_covered) == ("banks-changelog", True)
    assert settings.tables == f"{tmp_path}/lake/banks"
    assert settings.spark.conf["a"] == "b"
    assert CompactSettings.load(NEEDED, environ=environ).spark.conf == {"spark.hadoop.fs.s3a.endpoint": "http://s3"}
    remote = CompactSettings.load(["--application", "a", "--lake", "s3a://bucket/x/"], environ={})
    assert remote.tables == "s3a://bucket/x/a"
    for lake in ("s3://bucket/x", "S3://bucket/x/"):
        assert CompactSettings.load(["--application", "a", "--lake", lake], environ={}).tables == "s3a://bucket/x/a"


@pytest.mark.parametrize(
    ("variable", "option"),
    [
        ("AWS_REGION", "aws_region"),
        ("AWS_REGION", "region"),
        ("AWS_REGION", "AWS_REGION"),
        ("AWS_ENDPOINT_URL", "endpoint"),
        ("AWS_ENDPOINT_URL", "aws_endpoint_url"),
    ],
)
def test_lake_options_override_the_environment(monkeypatch: pytest.MonkeyPatch, variable: str, option: str) -> None:
    """Options from variables are in lower case. Of two names of one option, deltalake would take either at random."""
    monkeypatch.setenv(variable, "theirs")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    settings = CompactSettings.load([*NEEDED, "--lake-options", f"{option}=own"], environ={})
    of_test = {name: settings.storage_options.get(name) for name in {variable, option, "AWS_ALLOW_HTTP"}}
    assert of_test == {variable: None, "AWS_ALLOW_HTTP": "true"} | {option: "own"}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--lake", "x"], "application"),
        (["--application", "a b", "--lake", "x"], "application"),
        ([*NEEDED, "--spark.driver-memory", "much"], "spark.driver_memory"),
    ],
)
def test_a_wrong_setting_ends_a_job_by_its_name(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both jobs end with their own status and one line, before Spark is imported."""
    assert compact_main(flags) == audit_main(flags) == ExitStatus.WRONG_SETTING
    assert all(named in line for line in capsys.readouterr().err.splitlines())


def test_a_retention_below_the_minimum_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    """A retention below the minimum is rejected with its name and the minimum."""
    assert CompactSettings.load([*NEEDED, "--retention-hours", "24"], environ={}).retention_hours == 24
    for hours in ("0", "23"):
        assert compact_main([*NEEDED, "--retention-hours", hours]) == ExitStatus.WRONG_SETTING
        errors = capsys.readouterr().err
        assert "--retention-hours" in errors
        assert "equal to 24" in errors
