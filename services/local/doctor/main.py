"""`penstock doctor`: checks whether this machine and this Kafka meet Penstock's requirements.

`doctor.examinations` examines Kafka with its topics, Java, the cached jars and the disks. `doctor.findings` has the
rules that turn the facts into findings.

Prints one line for each finding on standard output, with how to fix it. The exit status is 1 if a finding is a problem,
2 for invalid settings, and else 0.
"""

from __future__ import annotations

import asyncio
import sys

from penstock.services.exit_status import ExitStatus
from penstock.services.local.doctor.examinations import examine_kafka, examine_machine
from penstock.services.local.doctor.findings import Finding
from penstock.services.local.settings import DoctorSettings
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.log import configure

ORDER = ("ok", "warning", "problem")


def main(arguments: list[str]) -> int:
    """Run `penstock doctor`. Returns the exit status."""
    try:
        settings = DoctorSettings.load(arguments, program="penstock doctor")
    except ConfigError as e:
        print(e, file=sys.stderr)
        return ExitStatus.WRONG_SETTING
    configure(settings.log, "doctor")
    findings: list[Finding] = examine_machine(settings.data_dir)
    findings += asyncio.run(examine_kafka(settings.kafka, settings.topics, SYSTEM_CLOCK.now_ms()))
    for finding in sorted(findings, key=lambda finding: ORDER.index(finding.level)):
        print(finding, flush=True)
    return ExitStatus.FAILED if any(finding.level == "problem" for finding in findings) else ExitStatus.OK
