"""Spark's Kafka client has not all of our ways to log in."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from penstock.shared.common.java_login import require_java_login
from penstock.shared.common.settings import KafkaSettings


def test_tokens_of_a_python_function_are_refused() -> None:
    """All other ways, and none, are taken as they are."""
    secured = {"security_protocol": "SASL_SSL", "sasl_username": "u", "sasl_password": SecretStr("p")}
    for mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
        kafka = KafkaSettings.model_validate({**secured, "sasl_mechanism": mechanism})
        assert require_java_login(kafka) is kafka
    assert require_java_login(KafkaSettings()) == KafkaSettings()
    tokens = {"sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_provider": "tokens:give"}
    with pytest.raises(ValueError, match="sasl_mechanism=OAUTHBEARER is nothing that jobs"):
        require_java_login(KafkaSettings.model_validate({"security_protocol": "SASL_SSL", **tokens}))
