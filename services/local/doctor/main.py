"""`penstock doctor`: checks whether this machine and this Kafka meet Penstock's requirements.

Prints one line for each finding on standard output; problems have the command that fixes them. The exit status is 0
without a problem (warnings included), 1 with one, 2 for invalid settings.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from pydantic import Field

from penstock.services.consumer.settings import Names
from penstock.services.local.doctor.examination import examine_kafka, examine_machine
from penstock.services.local.doctor.rules import Finding
from penstock.services.local.kafka import DEFAULT_DATA_DIR
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.log import configure
from penstock.shared.common.settings import CommandSettings, KafkaSettings, LogSettings

WELL, PROBLEM, WRONG_SETTINGS = 0, 1, 2
ORDER = ("ok", "warning", "problem")


class DoctorSettings(CommandSettings):
    """Checks Kafka, its topics and this machine, and reports problems with the commands that fix them."""

    log: LogSettings = LogSettings(level="warning")
    kafka: KafkaSettings = KafkaSettings(request_timeout_ms=10_000)
    topics: Names = Field(
        default=(), description="topics with event times, comma-separated; default: all topics are checked"
    )
    data_dir: Path = Field(default=DEFAULT_DATA_DIR, description="data folder of an embedded Kafka")


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit status."""
    try:
        settings = DoctorSettings.load(arguments, program="penstock doctor")
    except ConfigError as e:
        print(e, file=sys.stderr)
        return WRONG_SETTINGS
    configure(settings.log, "doctor")
    findings: list[Finding] = examine_machine(settings.data_dir)
    findings += asyncio.run(examine_kafka(settings.kafka, settings.topics, SYSTEM_CLOCK.now_ms()))
    for finding in sorted(findings, key=lambda finding: ORDER.index(finding.level)):
        print(finding, flush=True)
    return PROBLEM if any(finding.level == "problem" for finding in findings) else WELL


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
