"""Members of an application's group that are not instances of it.

An application's instances have an assignment strategy of their own (`standby_assignor`). If another consumer is in the
group first, the instances cannot join: the broker rejects them or, if the group is a KIP-848 group, assigns without
their strategy, which the instances reject. This module makes the error message, which names that consumer by its client
id and host.
"""

from __future__ import annotations

from penstock.shared.clients.admin import Admin, GroupDescription
from penstock.shared.common.errors import InconsistentGroupProtocol
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.runtime.standby_assignor import PREFIX

UNDECIDED = ""
"""The strategy of a group that has not agreed on one yet: brokers report it between two generations as well."""


def is_foreign_group(group: GroupDescription) -> bool:
    """Return whether the group's members are known to be other consumers than an application's instances."""
    return bool(group.members) and group.protocol != UNDECIDED and not group.protocol.startswith(PREFIX)


def describe_foreign_members(group: GroupDescription) -> str:
    """Return the client ids and hosts of a group's members, for a message.

    >>> from penstock.shared.clients.admin import MemberDescription
    >>> members = (MemberDescription("c-1", "c", "/10.0.0.7", None, frozenset()),)
    >>> describe_foreign_members(GroupDescription("app", "Stable", "consumer", "range", 1, members))
    "client 'c' (host 10.0.0.7)"
    """
    return ", ".join(sorted({f"client {one.client_id!r} (host {one.host.lstrip('/')})" for one in group.members}))


async def foreign_members_error(
    kafka: KafkaSettings, application_id: str, strategy: str, error: InconsistentGroupProtocol
) -> InconsistentGroupProtocol:
    """Return the error for an instance that the group has rejected. Its message names the group's remaining members.

    The instance must have left the group. `strategy` is its assignment strategy, `error` the group's error.
    """
    async with Admin(kafka) as admin:
        group = await admin.describe_group(application_id)
    others = describe_foreign_members(group)
    if not others:
        return InconsistentGroupProtocol(
            f"group {application_id} had members that are not instances of this application ({error}); they have "
            "left: start again"
        )
    if group.protocol.startswith(PREFIX):
        return InconsistentGroupProtocol(
            f"group {application_id}: {others} uses streams.partition_assignment_strategy="
            f"{group.protocol.removeprefix(PREFIX)}, this instance {strategy.removeprefix(PREFIX)}: stop all instances "
            "and start them with one strategy"
        )
    uses = f" and use the assignment strategy {group.protocol!r}" if group.protocol != UNDECIDED else ""
    return InconsistentGroupProtocol(
        f"group {application_id} has members that are not instances of this application{uses}: {others}. An "
        f"application's group is for its instances alone (strategy {strategy!r}): stop these consumers, or give "
        "them another group.id, or this application another streams.application_id"
    )
