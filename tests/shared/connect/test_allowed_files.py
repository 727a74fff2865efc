"""The files and URLs that connectors may use, and attempts to bypass the check."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.allowed_files import FILES_ALLOWED, AllowedFiles, LocalPath
from penstock.shared.connect.connectors.delta import DeltaSinkConnector
from penstock.shared.connect.connectors.file_stream import FileStreamSinkConnector, FileStreamSourceConnector
from penstock.shared.connect.connectors.files import FilesSinkConnector
from penstock.shared.connect.runtime.config_validation import validate_connector
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import State, TargetState
from penstock.shared.connect.runtime.worker_config import WorkerConfig, worker_config
from tests.shared.connect.harness import STRING, Running, running

CONNECTORS = {
    "FileStreamSource": ("file", {"topic": "t"}),
    "FileStreamSink": ("file", {"topics": "t"}),
    "FilesSink": ("url", {"topics": "t"}),
    "DeltaSink": ("table.uri", {"topics": "t"}),
}
CLASSES = (FileStreamSourceConnector, FileStreamSinkConnector, FilesSinkConnector, DeltaSinkConnector)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """An allowed folder beside a forbidden one, with links from the first to the second."""
    data, secret = tmp_path / "data", tmp_path / "secret"
    for folder in (data / "deep", secret, tmp_path / "database"):
        folder.mkdir(parents=True)
    (secret / "key").write_text("s3cret\n")
    (data / "link").symlink_to(secret)
    (data / "key").symlink_to(secret / "key")
    (data / "dangling").symlink_to(secret / "not yet")
    (data / "inner").symlink_to(data / "deep")
    (tmp_path / "other name").symlink_to(data)
    return data


@pytest.mark.parametrize("given", ["", "/", "/x", "/deep/../x", "/inner/x", "/no/such/x", "/./x"])
def test_paths_below_an_allowed_folder_are_allowed(data: Path, given: str) -> None:
    """Existing and new paths below an allowed folder are allowed, also by links that stay inside."""
    found = AllowedFiles((str(data),)).resolved("file", f"{data}{given}")
    assert Path(found).is_relative_to(data)
    assert AllowedFiles((str(data.parent / "other name"),)).resolved("file", f"{data}{given}") == found
    assert AllowedFiles((str(data),)).resolved("url", f"file://{data}{given}") == found


@pytest.mark.parametrize(
    "given",
    [
        "/etc/passwd", "{data}/../secret/key", "{data}/deep/../../secret/key", "{data}/link/key", "{data}/key",
        "{data}/dangling", "{data}base/x", "{data}/..", "secret/key", "../secret/key", "~/key", "file://{data}/../secret",
        "file://{data}/%2e%2e/secret/key", "FILE:///etc/passwd", "local:///etc/passwd", "file:/etc/passwd", "file://host/x",
        "file://[x/a", "file://{data}/a?", "file://{data}/a#", "file://{data}/a?b", "file://{data}/a#b",
        "{data}\0/x", "s3://bucket/x", "http://host/x", "simplecache::file:///etc/passwd", "memory://x", " file:///etc",
    ],
)  # fmt: skip
def test_all_other_paths_are_rejected(data: Path, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other paths, by their real location, are a ConfigError that names both settings."""
    monkeypatch.chdir(data.parent)
    for allowed in ((str(data),), (), (str(data), "s3://other")):
        with pytest.raises(ConfigError, match="for configuration file: "):
            AllowedFiles(allowed).resolved("file", given.format(data=data))
    with pytest.raises(ConfigError, match=FILES_ALLOWED):
        AllowedFiles(()).resolved("file", str(data))


def test_urls_below_an_allowed_url_are_allowed() -> None:
    """URLs are compared by scheme, host and path segments, without credentials and parameters;
    errors hide credentials.
    """
    files = AllowedFiles(("s3://bucket/a", "gs://all", "az://"))
    for url in (
        "s3://bucket/a", "s3://bucket/a/", "s3://bucket/a/b?region=x", "s3://k:p@bucket/a/b", "S3://bucket/a",
        "gs://all/x", "az://anything/x", "s3://bucket/a/my%20folder",
    ):  # fmt: skip
        assert files.resolved("url", url) == url
    for url in (
        "s3://bucket/ab", "s3://bucket", "s3://bucket/a/../b", "s3://bucket/a/%2e%2e/b", "s3://bucket/a/%2E./b",
        "s3://bucket/a\\..\\b", "s3://bucket/a/.\t./b", "s3://buck\net/a", "s3a://bucket/a", "s3://bucket@evil/a",
        "s3://evil/a?x=s3://bucket/a", "s3://evil?/bucket/a", "simplecache::s3://bucket/a", "s3://bucket/a::file:///etc",
        "s3://bucket/a#/../b", "gs://all.evil/x", "s3://bucket//a", "/bucket/a", "s3:bucket/a",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="url"):
            files.resolved("url", url)
    with pytest.raises(ConfigError) as raised:
        files.resolved("url", "s3://ann:s3cret@evil/a")
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["abfs", "abfss", "wasb", "wasbs", "az", "ABFSS", "oci"])
def test_a_container_before_the_at_sign_is_compared(scheme: str) -> None:
    """The name before `@` in a URL of Azure or Oracle is the container, not a user, so it must be the allowed one."""
    account = "acct.dfs.core.windows.net"
    whole, folder = f"{scheme}://lake@{account}", f"{scheme}://lake@{account}/connect"
    for files in (AllowedFiles((whole,)), AllowedFiles((folder,))):
        assert files.resolved("table.uri", f"{folder}/x") == f"{folder}/x"
        for container in ("secrets@", "secrets:lake@", "lake@secrets@", ""):
            with pytest.raises(ConfigError, match=r"table\.uri"):
                files.resolved("table.uri", f"{scheme}://{container}{account}/connect/x")


@pytest.mark.parametrize("entry", ["data", "./data", "file:///data", "s3://bucket/..", "simplecache::s3://bucket"])
def test_an_invalid_entry_ends_the_start(entry: str) -> None:
    """A worker accepts only absolute folders and plain URLs as entries."""
    props = {"key.converter": STRING, "value.converter": STRING}
    with pytest.raises(ConfigError, match=r"connect\.files\.allowed"):
        WorkerConfig({**props, FILES_ALLOWED: f"/data,{entry}"})
    assert WorkerConfig({**props, FILES_ALLOWED: "/data, s3://bucket/x"})[FILES_ALLOWED] == ["/data", "s3://bucket/x"]
    assert WorkerConfig(props)[FILES_ALLOWED] == []


class Swapping(AllowedFiles):
    """Swaps a path between the check and the open call."""

    swap: Callable[[], Any]

    def _allowed_path(self, setting: str, path: str) -> LocalPath:
        found = super()._allowed_path(setting, path)
        self.swap()
        return found


def test_a_link_created_after_the_check_is_not_followed(data: Path) -> None:
    """A link that replaces the file or a folder after the check is not followed."""
    secret = data.parent / "secret"
    files = Swapping((str(data),))

    def swap(name: str, to: Path) -> Callable[[], None]:
        def now() -> None:
            (data / "deep" / name).symlink_to(to)

        return now

    files.swap = swap("key", secret / "key")
    with pytest.raises(OSError, match="key"):
        files.open("file", f"{data}/deep/key", "rb")
    (data / "deep" / "key").unlink()
    with pytest.raises(OSError, match="key"):
        files.open("file", f"{data}/deep/key", "a")
    files.swap = swap("folder", secret)
    with pytest.raises(OSError, match="folder"):
        files.write_whole("url", f"{data}/deep/folder/new", b"x")
    (data / "deep" / "folder").unlink()
    files.swap = swap("new.new", secret / "planted")
    with pytest.raises(OSError, match=r"new\.new"):
        files.write_whole("url", f"{data}/deep/new", b"x")
    assert [path.name for path in secret.iterdir()] == ["key"]
    assert (secret / "key").read_text() == "s3cret\n"


def test_a_folder_is_not_opened_as_a_file(data: Path) -> None:
    """Opening a folder raises OSError with the path, and leaves no open file descriptor."""
    before = set(Path("/dev/fd").iterdir())
    for mode in ("rb", "a"):
        with pytest.raises(IsADirectoryError, match="deep"):
            AllowedFiles((str(data),)).open("file", f"{data}/deep", mode)
    assert set(Path("/dev/fd").iterdir()) <= before


def test_a_file_is_written_atomically(data: Path) -> None:
    """`write_whole` creates missing folders and replaces an existing file."""
    files = AllowedFiles((str(data / "later"),))
    for content in (b"first", b"second"):
        files.write_whole("url", f"file://{data}/later/a/b/file", content)
        assert [path.name for path in (data / "later/a/b").iterdir()] == ["file"]
        assert (data / "later/a/b/file").read_bytes() == content
    with pytest.raises(ConfigError, match="a folder"):
        files.open("file", str(data / "later"), "rb")


def test_a_written_file_is_on_the_disk(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`write_whole` syncs the content before the file gets its name, then the folder.

    Before, it syncs the entry of each folder on the path, since another task may have just made the folder. So a
    written file is complete after a power failure.
    """
    synced = []

    def sync(file: int) -> None:
        found = os.fstat(file)
        what = "folder" if stat.S_ISDIR(found.st_mode) else f"{found.st_size} bytes"
        synced.append((what, sorted(path.name for path in (data / "deep").rglob("*"))))

    monkeypatch.setattr(os, "fsync", sync)
    AllowedFiles((str(data),)).write_whole("url", f"{data}/deep/a/file", b"content")
    assert synced == [
        ("folder", []), ("folder", ["a"]), ("7 bytes", ["a", "file.new"]), ("folder", ["a", "file"])
    ]  # fmt: skip
    synced.clear()
    AllowedFiles((str(data),)).write_whole("url", f"{data}/deep/a/file", b"content")
    assert [what for what, _ in synced] == ["folder", "folder", "7 bytes", "folder"]
    synced.clear()
    shutil.rmtree(data / "deep")
    AllowedFiles((str(data / "deep/new"),)).write_whole("url", f"{data}/deep/new/file", b"content")
    assert [what for what, _ in synced] == ["folder", "folder", "7 bytes", "folder"]


@pytest.mark.parametrize("name", CONNECTORS)
def test_validation_names_the_setting(data: Path, name: str) -> None:
    """Validation reports a forbidden path at the setting of each connector that uses files."""
    setting, more = CONNECTORS[name]
    plugins, props = Plugins.installed(), {"name": "c", "connector.class": name, **more}
    converters = {"key.converter": STRING, "value.converter": STRING}
    worker = worker_config().parse({**converters, FILES_ALLOWED: str(data)})
    for outside in ("/etc/passwd", f"{data}/key", f"{data}/../x", "s3://bucket/x"):
        infos = validate_connector(plugins, {**props, setting: outside}, worker)
        assert [row["definition"]["name"] for row in infos.configs if row["value"]["errors"]] == [setting]
        assert FILES_ALLOWED in infos.errors[0]
    props[setting] = f"{data}/new"
    assert validate_connector(plugins, props, worker).errors == []
    assert FILES_ALLOWED in validate_connector(plugins, props, worker | {FILES_ALLOWED: []}).errors[0]


@pytest.mark.parametrize("connector", CLASSES)
async def test_connector_and_task_with_forbidden_paths_fail_to_start(data: Path, connector: type) -> None:
    """A connector and a task with a forbidden path fail to start, even if the config was not validated."""
    name = next(name for name in CONNECTORS if connector.__name__.startswith(name))
    setting, more = CONNECTORS[name]
    async with running(connect_files_allowed=str(data)) as run:
        props = {"name": "c", "connector.class": name, **more, setting: f"{data}/key"}
        assert await run.worker.start_connector("c", props, TargetState.STARTED, run.listener) is State.FAILED
        id = await run.run(connector, **{k.replace(".", "_"): v for k, v in props.items() if k not in BASE})
        assert run.listener.of("c") == run.listener.of(id) == ["failure"]
        assert all(FILES_ALLOWED in trace for trace in run.listener.traces)
        with pytest.raises(ConfigError, match=FILES_ALLOWED):
            run.worker.check_files(props)


BASE = ("name", "connector.class")


async def test_a_file_that_is_created_as_a_link_is_not_read(data: Path) -> None:
    """A source checks its file again when the file appears. A link that leads outside fails the task, by name."""
    async with running(connect_files_allowed=str(data)) as run:
        id = await run.run(FileStreamSourceConnector, file=f"{data}/later", topic="t")
        await run.until(lambda: "startup" in run.listener.of(id))
        (data / "later").symlink_to(data.parent / "secret" / "key")
        await run.until(lambda: "failure" in run.listener.of(id))
        # The second reason: the link appeared between the check and the opening, which does not follow it.
        reasons = (FILES_ALLOWED, os.strerror(errno.ELOOP))
        assert any(reason in run.listener.traces[0] for reason in reasons)
        assert "later" in run.listener.traces[0]
        assert run.cluster.records("t") == []


async def produced(run: Running, value: bytes) -> None:
    async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
        await producer.send("t", value)


def offset_of(run: Running) -> int | None:
    """The committed offset of the sink's group: earlier records are completely written."""
    (committed,) = run.cluster.committed("connect-c").values() or (None,)
    return committed and committed.offset


@pytest.mark.parametrize("connector", [FilesSinkConnector, DeltaSinkConnector])
async def test_a_folder_that_becomes_a_link_is_not_written_to(data: Path, connector: type) -> None:
    """Each write is checked again, not only the first."""
    json = {
        "value_converter": "org.apache.kafka.connect.json.JsonConverter",
        "value_converter_schemas_enable": "false",
    }
    secret = data.parent / "secret"
    async with running(connect_files_allowed=str(data)) as run:
        target = {"url": f"{data}/out"} if connector is FilesSinkConnector else {"table_uri": f"{data}/out"}
        id = await run.run(connector, **target, flush_size="1", topics="t", **json)
        await produced(run, b'{"n": 1}')
        # A table's log is written after the file, to wherever `out` leads by then: the first write must be complete.
        await run.until(lambda: offset_of(run) == 1)
        (data / "out").rename(data / "was")
        (data / "out").symlink_to(secret)
        await produced(run, b'{"n": 2}')
        await produced(run, b'{"n": 3}')
        await run.until(lambda: "failure" in run.listener.of(id))
        assert FILES_ALLOWED in run.listener.traces[0]
        assert [path.name for path in secret.iterdir()] == ["key"]


async def test_an_fsspec_file_system(data: Path) -> None:
    """An allowed fsspec URL is written to, and an option cannot change the file system."""
    import fsspec

    settings = {"format": "json", "flush_size": "1", "topics": "t", "storage_skip__instance__cache": "true"}
    async with running(connect_files_allowed="memory://lines") as run:
        id = await run.run(FilesSinkConnector, url="memory://lines/deep", **settings)
        await produced(run, b"a")
        files = fsspec.filesystem("memory")
        await run.until(lambda: files.find("/lines/deep"))
        assert [files.cat(path) for path in files.find("/lines/deep")] == [b'"a"\n']
        await run.worker.stop_tasks([id])
        await run.run(FilesSinkConnector, url="memory://lines/deep", storage_protocol="file", **settings)
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "storage.protocol=file" in run.listener.traces[0]
