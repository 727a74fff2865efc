"""What an audit can be asked for."""

from __future__ import annotations

import pytest

from penstock.services.spark.audit_settings import AuditSettings
from penstock.shared.common.errors import ConfigError

NEEDED = ("--application=a", "--lake=l")


def test_a_sample_of_no_key_is_refused() -> None:
    """A share that rounds to nothing would compare nothing; the least one is taken."""
    for share in ("1e-7", "0"):
        with pytest.raises(ConfigError, match="sample"):
            AuditSettings.load([*NEEDED, "--sample", share])
    assert AuditSettings.load([*NEEDED, "--sample", "0.000001"]).sample == 1e-6
