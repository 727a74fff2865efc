"""The client settings that a connector may override: `connector.client.config.override.policy`.

>>> check_overrides("Principal", "consumer", {"sasl.jaas.config": "x"})
>>> check_overrides("None", "consumer", {"max.poll.records": "1"})
Traceback (most recent call last):
    ...
penstock.errors.ConfigError: consumer.override.max.poll.records: the override policy None does not allow it
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.shared.common.errors import ConfigError

PRINCIPAL = ("security.protocol", "sasl.jaas.config", "sasl.mechanism")


def rejected_overrides(policy: str, overrides: Iterable[str]) -> list[str]:
    """Return the client settings that the policy does not allow."""
    kind = policy.lower()
    if kind == "all":
        return []
    return [name for name in overrides if kind == "none" or name not in PRINCIPAL]


def check_overrides(policy: str, client: str, overrides: Iterable[str]) -> None:
    """Raises ConfigError if the policy does not allow one of the settings."""
    if rejected := rejected_overrides(policy, overrides):
        names = ", ".join(f"{client}.override.{name}" for name in rejected)
        raise ConfigError(f"{names}: the override policy {policy} does not allow it")
