"""`penstock streams reset --execute`: deletes an application's state, so that it starts from the beginning.

No instance may run during a reset. The group's offsets are deleted last, and a worker that finds offsets without their
state does not start. So after an interrupted reset the application cannot run with a part of its state; repeat the
reset. Result topics, late records and dead letters are not deleted. The restarted application writes them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from penstock.shared.clients.admin import Admin
from penstock.shared.common.errors import GroupNotEmpty, GroupNotFound
from penstock.shared.common.lake.application_files import (
    TableFiles,
    find_files,
    remove_files,
    remove_folder,
    require_no_link,
)
from penstock.shared.common.topic_names import CHANGELOG_SUFFIX, changelog_topic, instances_topic, is_repartition_topic
from penstock.shared.streams.settings import StreamsSettings


class ResetPlan(NamedTuple):
    """The data that a reset deletes: committed offsets, topics, the snapshot with its tables, and the folders of local
    state.
    """

    application: str
    offsets: dict[str, int]
    """By topic and partition."""
    topics: list[str]
    snapshot: str | None
    """A folder or URI; None if there is none."""
    tables: dict[str, TableFiles]
    unsure: dict[str, str]
    """Repartition topics that are not deleted, because their names fit another application too; by topic, that
    application.
    """
    state: tuple[str, ...] = ()
    """Folders of this machine only. On another machine, the instance itself discards the state when it finds that the
    changelog was deleted.
    """

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to delete."""
        return not (self.offsets or self.topics or self.snapshot or self.state)

    def lines(self) -> list[str]:
        """Return the plan in words."""
        unsure = [f"topic {topic} stays: it may be application {other}'s" for topic, other in self.unsure.items()]
        if self.is_empty:
            return [f"application {self.application}: there is nothing to delete", *unsure]
        lines = [f"topic {topic}: its records" for topic in self.topics]
        if self.snapshot is not None:
            tables = [
                f"{name} ({n} file{'s'[: n != 1]}, {size_bytes} bytes)" for name, (n, size_bytes) in self.tables.items()
            ]
            lines.append(f"snapshot {self.snapshot}: {', '.join(tables) or 'an empty folder'}")
        lines += [f"state {folder}: stores on disk" for folder in self.state]
        lines += [f"offset of {at}: {offset}" for at, offset in self.offsets.items()]
        lines.append("topics of results, late records and dead letters stay: their records are written again")
        return lines + unsure


async def plan_reset(admin: Admin, settings: StreamsSettings) -> ResetPlan:
    """Return what a reset would delete now.

    Raises GroupNotEmpty, which names the members that still run, and LakeNotRemoved if the files or objects of the lake
    cannot be listed. Raises ConfigError if a folder to delete is a symbolic link, or if the object store
    cannot be opened.
    """
    application = settings.application_id
    try:
        members = (await admin.describe_group(application)).members
        offsets = await admin.group_offsets(application)
    except GroupNotFound:
        members = ()
        offsets = {}
    if members:
        raise GroupNotEmpty(f"application {application} is running: stop {'; '.join(map(str, members))}")
    known = await admin.list_topics()
    always = (changelog_topic(application), instances_topic(application))
    repartition, unsure = repartition_topics_to_delete(known, application, {at.topic for at in offsets})
    own = [name for name in known if name in always or name in repartition]
    found = None
    if settings.lake is not None:
        found = await asyncio.to_thread(find_files, settings.lake, application, settings.lake_options)
    snapshot, tables = (found.root, found.tables) if found else (None, {})
    committed = {str(at): to.offset for at, to in sorted(offsets.items())}
    return ResetPlan(
        application=application,
        offsets=committed,
        topics=own,
        snapshot=snapshot,
        tables=tables,
        unsure=unsure,
        state=_local_state_folders(settings),
    )


def repartition_topics_to_delete(
    known: Iterable[str], application: str, committed: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the repartition topics that a reset of `application` deletes, and those that it leaves, with the other
    application that may own them.

    `known` are the names of all topics of the cluster, `committed` those for which the group has committed offsets. A
    topic is deleted if it is in `committed`, or if its name fits no other application that has a changelog topic.

    >>> topics = ["shop-changelog", "shop-by-user-repartition", "shop-eu-changelog", "shop-eu-by-user-repartition"]
    >>> repartition_topics_to_delete(topics, "shop", ())
    (['shop-by-user-repartition'], {'shop-eu-by-user-repartition': 'shop-eu'})
    """
    topics = list(known)
    others = [name.removesuffix(CHANGELOG_SUFFIX) for name in topics if name.endswith(CHANGELOG_SUFFIX)]
    own = []
    unsure = {}
    for topic in topics:
        if not is_repartition_topic(topic, application):
            continue
        # A repartition topic's name begins with its application's name, which may itself begin with another
        # application's.
        claims = [other for other in others if other != application and is_repartition_topic(topic, other)]
        if topic in committed or not claims:
            own.append(topic)
        else:
            unsure[topic] = max(claims, key=len)
    return own, unsure


def _local_state_folders(settings: StreamsSettings) -> tuple[str, ...]:
    """Return the folders of the application's stores on disk: an instance's own, and those of its workers.

    Raises ConfigError for a folder that cannot be removed because it is a symbolic link.
    """
    root = Path(settings.state_dir)
    folders = (root / settings.application_id, *root.glob(f"worker-*/{settings.application_id}"))
    found = [folder for folder in folders if folder.is_dir()]
    for folder in found:
        # If only `apply_reset` found the link, it would already have deleted the topics.
        require_no_link(folder)
    return tuple(sorted(map(str, found)))


async def apply_reset(admin: Admin, plan: ResetPlan, settings: StreamsSettings) -> None:
    """Delete what the plan names, the group's offsets last. Raises LakeNotRemoved if files could not be removed."""
    if plan.topics:
        await admin.delete_topics(plan.topics)
    if plan.snapshot is not None and settings.lake is not None:
        await asyncio.to_thread(remove_files, settings.lake, plan.application, settings.lake_options)
    for folder in plan.state:
        await asyncio.to_thread(remove_folder, Path(folder))
    if plan.offsets:
        await admin.delete_group(plan.application)
