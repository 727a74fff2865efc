"""How error messages and log lines name a member of a group.

>>> describe_member("c", GroupMetadata("g", 3, "m"))
'client c, group g, generation 3, member m'
>>> describe_member("c", GroupMetadata("g", 3, "m", "i"))
'client c, group g, generation 3, member m, instance i'
"""

from __future__ import annotations

from penstock.shared.common.records import GroupMetadata


def describe_member(client_id: str, member: GroupMetadata) -> str:
    """Return how error messages name the member."""
    instance = f", instance {member.group_instance_id}" if member.group_instance_id else ""
    return (
        f"client {client_id}, group {member.group_id}, generation {member.generation_id}, "
        f"member {member.member_id}{instance}"
    )


def log_fields(client_id: str, member: GroupMetadata) -> dict[str, object]:
    """Return the fields that name the member in a log line."""
    return {
        "client_id": client_id,
        "group_id": member.group_id,
        "generation": member.generation_id,
        "member_id": member.member_id,
        "group_instance_id": member.group_instance_id,
    }
