"""The settings of an audit."""

from __future__ import annotations

import pytest

from penstock.services.spark.audit.settings import AuditSettings
from penstock.shared.common.errors import ConfigError

NEEDED = ("--application=a", "--lake=l")


def test_a_sample_of_no_key_is_refused() -> None:
    """A share that rounds to zero would compare nothing and is rejected. The smallest valid share is accepted."""
    for share in ("1e-7", "0"):
        with pytest.raises(ConfigError, match="sample"):
            AuditSettings.load([*NEEDED, "--sample", share])
    assert AuditSettings.load([*NEEDED, "--sample", "0.000001"]).sample == 1e-6


def test_a_login_that_java_lacks_is_refused() -> None:
    """OAUTHBEARER tokens come from a Python function, so it is rejected.

    Every other mechanism, and none, is accepted.
    """
    secured = [*NEEDED, "--kafka.security-protocol=SASL_SSL", "--kafka.sasl-username=u", "--kafka.sasl-password=p"]
    for mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
        kafka = AuditSettings.load([*secured, "--kafka.sasl-mechanism", mechanism], environ={}).kafka
        assert kafka.sasl_mechanism == mechanism
    assert AuditSettings.load(NEEDED, environ={}).kafka.sasl_mechanism is None
    tokens = ["--kafka.sasl-mechanism=OAUTHBEARER", "--kafka.sasl-oauth-token-provider=tokens:give"]
    with pytest.raises(ConfigError, match=r"kafka.*OAUTHBEARER.*Java"):
        AuditSettings.load([*secured, *tokens], environ={})
