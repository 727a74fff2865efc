"""The doctor's findings from given facts, and its output and exit statuses without a broker."""

from __future__ import annotations

import pytest

from penstock.services.local.doctor.findings import (
    Finding,
    TopicFacts,
    all_topic_findings,
    changelog_findings,
    dead_letter_findings,
    disk_finding,
    topic_findings,
)
from penstock.services.local.doctor.main import main
from penstock.shared.clients.admin import event_time_topic
from penstock.shared.clients.admin.types import UNLIMITED_TIMESTAMPS
from penstock.shared.streams.runtime.application_topics import CHANGELOG_CONFIGS
from penstock.shared.streams.settings import DEAD_LETTER_OVERHEAD_MAX

WEEK = str(7 * 86_400_000)
DEFAULTS = {
    "cleanup.policy": "delete",
    "retention.ms": WEEK,
    "retention.bytes": "-1",
    "segment.ms": WEEK,
    "message.timestamp.type": "CreateTime",
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": str(2**63 - 1),
    "max.message.bytes": "1048588",
}
KAFKA = "kafka-1:9092"
ALTER = f"kafka-configs.sh --bootstrap-server {KAFKA} --alter --entity-type topics --entity-name"


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def configs(**changed: str) -> dict[str, str]:
    return DEFAULTS | {name.replace("_", "."): value for name, value in changed.items()}


def test_an_ordinary_topic_has_no_finding() -> None:
    """A retention of a week is no finding if no record is older than that by its own time."""
    assert topic_findings(TopicFacts("metrics", 3, DEFAULTS), KAFKA) == []


def test_topics_that_penstock_creates_have_no_finding() -> None:
    """An event-time topic has no finding, even if it is named and full of old records."""
    made = DEFAULTS | dict(event_time_topic("clicks", 3).configs)
    assert topic_findings(TopicFacts("clicks", 3, made, due=9, named=True), KAFKA) == []


def test_a_retention_by_size_is_not_one_by_time() -> None:
    """With `retention.bytes` alone Kafka deletes the first records, whatever their event times."""
    made = DEFAULTS | dict(event_time_topic("clicks", 3).configs) | {"retention.bytes": "1000"}
    (finding,) = topic_findings(TopicFacts("clicks", 3, made, named=True), KAFKA)
    assert "retention.bytes=1000" in finding.message


def test_records_older_than_the_retention_are_a_problem() -> None:
    """Records older than the retention are a problem with their number and the command that keeps them."""
    facts = TopicFacts("clicks", 3, configs(retention_bytes="1000"), due=12, gone=5)
    first, *others = topic_findings(facts, KAFKA)
    assert (first.level, first.about) == ("problem", "topic clicks")
    assert f"retention.ms={WEEK}, retention.bytes=1000" in first.message
    assert "12 records are due" in first.message
    assert first.fix == f"{ALTER} clicks --add-config retention.ms=-1,retention.bytes=-1"
    assert str(first).startswith("problem  topic clicks: retention.ms=")
    assert str(first).endswith("; fix it with: " + first.fix)
    # The warnings are about segment.ms and message.timestamp.after.max.ms.
    assert levels(others) == ["warning"] * 2


def test_a_named_topic_has_a_warning_for_each_risk() -> None:
    """Retention, segment time and the limit for future times each have a warning with a command."""
    findings = topic_findings(TopicFacts("clicks", 3, DEFAULTS, named=True), KAFKA)
    assert levels(findings) == ["warning"] * 3
    assert [finding.fix.rpartition(" ")[2] for finding in findings] == [
        "retention.ms=-1",
        "segment.ms=9223372036854775807",
        "message.timestamp.after.max.ms=9223372036854775807",
    ]


def test_a_late_topic_is_checked_without_being_named() -> None:
    """A topic of late records is checked for its retention, since its records are old."""
    assert "retention.ms" in topic_findings(TopicFacts("clicks-late", 3, DEFAULTS), KAFKA)[0].message


@pytest.mark.parametrize(
    ("changed", "level", "fix"),
    [
        ({"message_timestamp_type": "LogAppendTime"}, "problem", "message.timestamp.type=CreateTime"),
        ({"message_timestamp_before_max_ms": "1000"}, "problem", "message.timestamp.before.max.ms="),
        ({"cleanup_policy": "compact"}, "warning", "cleanup.policy=delete"),
    ],
)
def test_configs_that_lose_event_times(changed: dict[str, str], level: str, fix: str) -> None:
    """Configs that overwrite or reject event times, or compact records away, have a finding with a fix."""
    findings = topic_findings(TopicFacts("clicks", 3, configs(**changed), named=True), KAFKA)
    assert (level, True) in [(finding.level, fix in finding.fix) for finding in findings]


def configs_before_3_6(difference_ms: int) -> dict[str, str]:
    kept = {name: value for name, value in DEFAULTS.items() if name not in UNLIMITED_TIMESTAMPS}
    return kept | {"message.timestamp.difference.max.ms": str(difference_ms)}


def test_kafka_before_3_6_has_one_limit_of_timestamps() -> None:
    """The limit is a problem as its successor is, and the commands have only configs that such a broker knows."""
    facts = TopicFacts("clicks", 3, configs_before_3_6(1_000), named=True)
    findings = all_topic_findings({"clicks": facts}, ["gone"], [], KAFKA)
    limits = [f for f in findings if f.message.startswith("message.timestamp.difference.max.ms=1000: ")]
    assert levels(limits) == ["problem"]
    assert limits[0].fix == f"{ALTER} clicks --add-config message.timestamp.difference.max.ms={2**63 - 1}"
    created = [finding.fix for finding in findings if "--create" in finding.fix]
    assert len(created) == 2
    for fix in created:
        assert "--config message.timestamp.difference.max.ms=" in fix
        assert "message.timestamp.before.max.ms" not in fix
    unlimited = TopicFacts("clicks", 3, configs_before_3_6(2**63 - 1), named=True)
    assert "problem" not in levels(topic_findings(unlimited, KAFKA))


def test_without_a_topic_the_command_says_what_kafka_before_3_6_needs() -> None:
    """If no examined topic shows Kafka's version, the command that creates a missing topic has the older limit as a
    note. Otherwise it has no note."""
    (finding,) = all_topic_findings({}, ["gone"], [], KAFKA)
    command, _, note = finding.fix.partition(" (")
    assert "message.timestamp.before.max.ms" in command
    assert "message.timestamp.difference.max.ms" not in command
    assert f"message.timestamp.difference.max.ms={2**63 - 1}" in note
    known = all_topic_findings({"clicks": TopicFacts("clicks", 3, DEFAULTS)}, ["gone"], [], KAFKA)
    assert [one.fix for one in known if "--create" in one.fix] == [command]


def test_a_changelog_that_loses_state_is_a_problem() -> None:
    """A changelog's config that loses state is a problem if its application's group exists, and else a warning."""
    facts = TopicFacts("visits-changelog", 3, dict(CHANGELOG_CONFIGS) | {"cleanup.policy": "compact"})
    (ours,) = changelog_findings(facts, ["visits"], KAFKA)
    assert (ours.level, ours.fix) == ("problem", f"{ALTER} visits-changelog --add-config cleanup.policy=delete")
    assert levels(changelog_findings(facts, ["other"], KAFKA)) == ["warning"]
    assert changelog_findings(TopicFacts("visits-changelog", 3, CHANGELOG_CONFIGS), ["visits"], KAFKA) == []


def test_a_dead_letter_topic_needs_the_sources_record_size() -> None:
    """A missing dead-letter topic of a named source is a warning, and one with a smaller
    record limit a problem, each with a command.
    """
    source = TopicFacts("clicks", 3, DEFAULTS, named=True)
    (missing,) = dead_letter_findings(source, None, KAFKA)
    assert missing.level == "warning"
    assert "--create --topic clicks-dlq --partitions 3 --config retention.ms=-1" in missing.fix
    wide = 1_048_588 + DEAD_LETTER_OVERHEAD_MAX
    assert missing.fix.endswith(f"--config max.message.bytes={wide}")
    (narrow,) = dead_letter_findings(source, TopicFacts("clicks-dlq", 3, DEFAULTS), KAFKA)
    assert (narrow.level, narrow.fix) == ("problem", f"{ALTER} clicks-dlq --add-config max.message.bytes={wide}")
    dead_letters = TopicFacts("clicks-dlq", 3, configs(max_message_bytes=str(wide)))
    assert dead_letter_findings(source, dead_letters, KAFKA) == []
    assert dead_letter_findings(TopicFacts("metrics", 3, DEFAULTS), None, KAFKA) == []


def test_a_dead_letter_topic_needs_at_most_the_largest_limit_of_kafka() -> None:
    """If the source topic has the largest `max.message.bytes` of Kafka, its dead-letter topic needs the same."""
    largest = configs(max_message_bytes=str(2**31 - 1))
    source = TopicFacts("clicks", 3, largest, named=True)
    (missing,) = dead_letter_findings(source, None, KAFKA)
    assert missing.fix.endswith(f"--config max.message.bytes={2**31 - 1}")
    assert dead_letter_findings(source, TopicFacts("clicks-dlq", 3, largest), KAFKA) == []


def test_each_topic_has_the_rules_of_its_kind() -> None:
    """Missing and leaderless topics are problems, and a dead-letter topic's retention is not checked."""
    topics = {
        "clicks-dlq": TopicFacts("clicks-dlq", 1, DEFAULTS, due=3),
        "visits-changelog": TopicFacts("visits-changelog", 1, DEFAULTS, due=3),
        "broken": TopicFacts("broken", 2, DEFAULTS, leaderless=(1,)),
    }
    findings = all_topic_findings(topics, ["gone"], ["visits"], KAFKA)
    assert [(finding.level, finding.about) for finding in findings] == [
        ("problem", "topic gone"),
        ("problem", "topic broken"),
        ("problem", "changelog visits-changelog"),
    ]
    assert "partitions 1 have no leader" in findings[1].message


@pytest.mark.parametrize(("free_mb", "level"), [(10, "problem"), (500, "warning"), (5_000, "ok")])
def test_a_disk_that_is_nearly_full(free_mb: int, level: str) -> None:
    """Little free space is a warning, and very little is a problem."""
    finding = disk_finding("/data", free_mb << 20)
    assert (finding.level, finding.message) == (level, f"{free_mb} MiB are free")
    assert (finding.fix == "") == (level == "ok")


def test_an_invalid_setting_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid setting ends with status 2 before anything is checked."""
    assert main(["--kafka.bootstrap-server=x"]) == 2
    output = capsys.readouterr()
    assert "kafka.bootstrap-servers" in output.err
    assert output.out == ""


def test_an_unreachable_kafka_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """An unreachable Kafka ends with status 1 and is the last line, with its fix; the machine
    is checked nevertheless.
    """
    assert main(["--kafka.bootstrap-servers=127.0.0.1:1", "--kafka.request-timeout-ms=500"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("problem  Kafka at 127.0.0.1:1: BrokerNotAvailable")
    assert "fix it with: penstock kafka" in lines[-1]
    assert any(line.split()[1] == "Java:" for line in lines)
    assert any("disk of" in line for line in lines)


def test_missing_jars_are_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """Missing jars are warnings with the command that downloads them, since the first start does it too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    main(["--kafka.bootstrap-servers=127.0.0.1:1", "--kafka.request-timeout-ms=100"])
    lines = capsys.readouterr().out.splitlines()
    jars = [line for line in lines if "the first start downloads them" in line]
    assert [line.rpartition("fix it with: ")[2] for line in jars] == [
        "penstock jars kafka",
        "penstock jars spark",
    ]
