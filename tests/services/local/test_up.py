"""`penstock up`: the checks before anything is started, the services that it runs, and its default topology."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from rich.console import Console

from penstock.api.settings import Credential
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.services.local.broker_config import LOG_FOLDER
from penstock.services.local.connect_worker import make_connect_worker, worker_properties
from penstock.services.local.embedded_kafka import META_PROPERTIES, EmbeddedKafka
from penstock.services.local.gateway import GatewayDaemon
from penstock.services.local.settings import ConnectWorkerSettings, GatewaySettings, UpSettings
from penstock.services.local.stack import (
    KILL_GRACE_MS,
    SHUTDOWN_TIMEOUT_MS,
    Service,
    ServiceSpec,
    Stack,
    failing_checks,
)
from penstock.services.local.topologies import sessions
from penstock.services.local.up import Up, main, require_topics
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.setting_names import ENV_PREFIX
from penstock.shared.common.settings import HttpSettings, KafkaSettings, ServiceSettings
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

MODULE = """
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder

def build():
    builder = StreamsBuilder()
    builder.stream("clicks").to("visits")
    return builder.build()
"""


@pytest.fixture(autouse=True)
def _own_folder_and_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "up_topologies.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = logging.root.handlers[:], logging.root.level
    yield
    sys.modules.pop("up_topologies", None)
    logging.root.handlers[:], logging.root.level = before


@pytest.mark.parametrize(
    ("flag", "setting"),
    [("http.port", "http.port"), ("broker.port", "broker.port"), ("connect-port", "connect_port")],
)
def test_a_port_in_use_is_an_error_before_kafka_is_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], flag: str, setting: str
) -> None:
    """A port in use ends with status 2 and one line with the setting, without a data folder."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = ["--http.port=0", "--connect-port=0"]
        assert main([*free, f"--{flag}={port}", "--data-dir=data", "--log.format=json"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{setting}: port {port}" in line
    assert not (tmp_path / "data").exists()


def test_the_port_of_a_broker_that_was_killed_is_not_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A broker with data may still be ending, so its port is checked only at its start, after everything else."""
    storage = tmp_path / "data" / "kafka" / LOG_FOLDER
    storage.mkdir(parents=True)
    (storage / META_PROPERTIES).touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = ["--http.port=0", "--connect-port=0", f"--broker.port={port}"]
        assert main([*ports, "--handler=nowhere:handle", "--data-dir=data", "--log.format=json"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "handler: no module 'nowhere'" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topic=clicks"], "reads the topic events, which Kafka does not have: `up` creates only clicks (--topic)"),
        (
            ["--topology=up_topologies:build"],
            "reads the topic clicks, which Kafka does not have: `up` creates only events",
        ),
        (
            ["--topology=up_topologies:build", "--topic=clicks"],
            "handles the topic sessions (--topics), which Kafka does not have: the topology up_topologies:build writes "
            "to visits, clicks-dlq",
        ),
        (["--topology=up_topologies:biuld"], "topology: up_topologies:biuld: "),
        (["--topology=nowhere:build"], "No module named 'nowhere'"),
        (["--handler=nowhere:handle"], "handler: no module 'nowhere'"),
    ],
    ids=["another topic", "another topology", "results that nobody writes", "no function", "no module", "no handler"],
)
def test_a_program_that_cannot_run_is_an_error_before_kafka_is_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """A topology or handler that cannot run ends with status 2 and one line that names it, without a data folder."""
    assert main([*arguments, "--http.port=0", "--connect-port=0", "--data-dir=data", "--log.format=json"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("variable", "value", "setting"),
    [
        ("COMPACTION__INTERVAL_MS", "soon", "compaction.interval_ms"),
        ("CONNECT", '{"offset.flush.interval.ms": "soon"}', "offset.flush.interval.ms"),
    ],
    ids=["aggregator", "Connect worker"],
)
def test_an_invalid_setting_of_a_service_is_an_error_before_kafka_is_started(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    setting: str,
) -> None:
    """An invalid setting of a service ends with status 2 and its name, without a data folder."""
    monkeypatch.setenv(f"{ENV_PREFIX}{variable}", value)
    # The topic alone is an error too, so Kafka is not started in any case.
    free = ["--http.port=0", "--connect-port=0", "--topic=clicks", "--data-dir=data", "--log.format=json"]
    assert main(free) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert setting in line
    assert not (tmp_path / "data").exists()


def test_the_settings_file_of_up_has_the_settings_of_the_aggregator_too(capfd: pytest.CaptureFixture[str]) -> None:
    """An invalid setting of the aggregator in the file of `--config` ends with status 2 and its name."""
    Path("mine.toml").write_text('[compaction]\ninterval_ms = "soon"\n')
    # The topic alone is an error too, so Kafka is not started in any case.
    free = ["--http.port=0", "--connect-port=0", "--topic=clicks", "--data-dir=data", "--log.format=json"]
    assert main(["--config", "mine.toml", *free]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "compaction.interval_ms" in line


def test_services_read_the_settings_file_of_up() -> None:
    """A service of `up` loads its settings from the file of `--config`."""
    Path("mine.toml").write_text('[streams]\napplication_id = "mine"\n')
    up = Up(UpSettings(), settings_file=Path("mine.toml"))
    up._broker = RunningBroker()  # type: ignore[assignment]
    spec = up._service_spec("aggregator", up._aggregator_settings())
    environ = {f"{ENV_PREFIX}{name}": value for name, value in spec.settings.items()}
    assert AggregatorSettings.load(environ=environ).streams.application_id == "mine"


def test_services_connect_to_the_one_broker_despite_settings_of_a_cluster(tmp_path: Path) -> None:
    """The file's security protocol and replication factor are those of another Kafka."""
    (tmp_path / "penstock.toml").write_text(
        '[kafka]\nsecurity_protocol = "SASL_SSL"\nsasl_mechanism = "SCRAM-SHA-512"\nsasl_username = "a"\n'
        'sasl_password = "b"\nssl_cafile = "ca.pem"\n[streams]\nreplication_factor = 3\n'
    )
    up = Up(UpSettings())
    up._broker = RunningBroker()  # type: ignore[assignment]
    for spec, settings in (
        (up._service_spec("aggregator", up._aggregator_settings()), AggregatorSettings),
        (up._consumer_spec(), ConsumerServiceSettings),
        (up._gateway_spec([]), GatewaySettings),
        (up._connect_spec(), ConnectWorkerSettings),
    ):
        loaded = settings.load(environ={f"{ENV_PREFIX}{name}": value for name, value in spec.settings.items()})
        assert loaded.kafka.bootstrap_servers == RunningBroker.bootstrap_servers
        assert loaded.kafka.security_protocol == "PLAINTEXT"
        assert not isinstance(loaded, AggregatorSettings) or loaded.streams.replication_factor == -1


def test_the_gateway_has_only_the_services_of_up(tmp_path: Path) -> None:
    """The services that the file names for `penstock admin` are those of another deployment."""
    (tmp_path / "penstock.toml").write_text('[services]\nproducer = "http://producer.example:8081"\n')
    up = Up(UpSettings())
    up._broker = RunningBroker()  # type: ignore[assignment]
    consumer = Service(up._consumer_spec(), 1, tmp_path / "consumer.log", {})
    environ = {f"{ENV_PREFIX}{name}": value for name, value in up._gateway_spec([consumer]).settings.items()}
    assert GatewaySettings.load(environ=environ).gateway_services == {"consumer": "http://127.0.0.1:1"}


class Started(Exception):
    """Raised when Kafka would be started."""


class BrokerWithData:
    """A broker with the data of an earlier start."""

    def has_data(self) -> bool:
        return True

    async def start(self) -> None:
        raise Started


async def test_topics_of_a_broker_with_data_are_checked_later() -> None:
    """With data of an earlier start, topics are checked only once Kafka runs."""
    settings = UpSettings(http=HttpSettings(port=0), connect_port=0, topology="up_topologies:build")
    up = Up(settings, Console(quiet=True))
    up._broker = BrokerWithData()  # type: ignore[assignment]
    with pytest.raises(Started):
        await up.startup()


def test_one_port_for_two_settings_is_rejected() -> None:
    """The error names both settings. Without the Connect worker, its port is free for others."""
    arguments = ["--http.port=28500", "--connect-port=28500"]
    with pytest.raises(ConfigError, match=r"http\.port and connect_port are both 28500"):
        UpSettings.load(arguments, environ={})
    with pytest.raises(ConfigError, match=r"http\.port and broker\.port are both 28500"):
        UpSettings.load(["--http.port=28500", "--broker.port=28500"], environ={})
    UpSettings.load([*arguments, "--no-connect-worker"], environ={})


async def test_tls_is_an_error_before_kafka_is_started() -> None:
    """A certificate is a ConfigError with the setting's name before anything starts."""
    http = HttpSettings(port=0, ssl_certfile=Path("server.pem"))
    up = Up(UpSettings(http=http, connect_port=0), Console(quiet=True))
    up._broker = BrokerWithData()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"http\.ssl_certfile"):
        await up.startup()


class RunningBroker:
    """A broker that runs until it is cancelled."""

    bootstrap_servers = "127.0.0.1:1"

    async def wait(self) -> None:
        await asyncio.Event().wait()


async def test_a_service_with_an_invalid_setting_ends_up(tmp_path: Path) -> None:
    """A service that ends with status 2 is not restarted: `up` ends with the service's last output."""
    (tmp_path / "rejects.py").write_text("print('topics: unset'); open('starts', 'a').write('x'); raise SystemExit(2)")
    up = Up(UpSettings(), Console(quiet=True))
    up._broker = RunningBroker()  # type: ignore[assignment]
    path = {"PYTHONPATH": str(tmp_path)}
    await up._stack.start(ServiceSpec("consumer", {}, module="rejects", environment=path))
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(20):
            await up.main_loop()
    (error,) = ended.value.exceptions
    assert isinstance(error, ConfigError)
    assert "topics: unset" in str(error)
    assert (tmp_path / "starts").read_text() == "x"


def test_services_have_the_http_settings_of_up() -> None:
    """The proxies and the limit of the head that are set for `up` are those of its services."""
    up = Up(UpSettings(http=HttpSettings(forwarded_allow_ips=("10.0.0.1",), max_head_bytes=9_999)))
    up._broker = RunningBroker()  # type: ignore[assignment]
    environ = {f"{ENV_PREFIX}{name}": value for name, value in up._gateway_spec([]).settings.items()}
    http = GatewaySettings.load(environ=environ).http
    assert (http.forwarded_allow_ips, http.max_head_bytes) == (("10.0.0.1",), 9_999)


def joined() -> Topology:
    builder = StreamsBuilder()
    names = builder.global_table("names")
    named = builder.stream("events").join(names, lambda event, name: event, key=lambda record: record.key)
    by_name = named.key_by(lambda record: "k", name="by-name").group_by_key()
    by_name.tumbling_window(10).aggregate("s", n=Count()).on_close().to("sessions")
    return builder.build().of_application("app")


def test_topics_of_an_earlier_run_may_be_read() -> None:
    """Topics of sources and global tables must exist or be created by `up`; the topology's internal topics need not."""
    settings = UpSettings()
    require_topics(settings, joined(), ["names"])
    with pytest.raises(ConfigError, match="topic names"):
        require_topics(settings, joined(), ["clicks"])
    settings = UpSettings(topic="clicks", topics=("a", "sessions", "clicks"))
    with pytest.raises(ConfigError, match="topics events, names"):
        require_topics(settings, joined(), ())
    with pytest.raises(ConfigError, match="handles the topic a "):
        require_topics(settings, joined(), ["events", "names"])
    require_topics(settings, joined(), ["events", "names", "a"])


def test_a_topic_that_the_topology_writes_and_reads_may_be_missing() -> None:
    """The aggregator creates it. Only a topic that nothing writes to is an error."""
    builder = StreamsBuilder()
    builder.stream("events").to("clean")
    builder.stream("clean").to("sessions")
    require_topics(UpSettings(), builder.build(), ())
    builder.stream("other").to("clean")
    with pytest.raises(ConfigError, match="reads the topic other,"):
        require_topics(UpSettings(), builder.build(), ())


def test_a_folder_has_data_once_a_broker_ran_in_it(tmp_path: Path) -> None:
    """A folder has data once it is formatted."""
    kafka = EmbeddedKafka(tmp_path)
    assert not kafka.has_data()
    (tmp_path / LOG_FOLDER).mkdir()
    (tmp_path / LOG_FOLDER / META_PROPERTIES).touch()
    assert kafka.has_data()


def test_a_service_is_run_by_its_name_unless_it_has_a_module() -> None:
    """A service runs as `penstock NAME`, or as `python -m MODULE` if it has a module."""
    assert ServiceSpec("aggregator", {}).command() == [sys.executable, "-m", "penstock.services.cli", "aggregator"]
    assert ServiceSpec("gateway", {}, module="penstock.services.local.gateway").command()[2:] == [
        "penstock.services.local.gateway"
    ]


def test_a_stack_without_services_has_nothing_to_check(tmp_path: Path) -> None:
    """The check of a stack without services passes."""
    stack = Stack(tmp_path, hermetic=True)
    stack.check()
    assert stack.services == {}


def test_a_service_is_killed_after_its_shutdown_timeout(tmp_path: Path) -> None:
    """A service is killed only after its shutdown timeout and a grace period."""
    assert ServiceSettings().shutdown_timeout_ms == SHUTDOWN_TIMEOUT_MS
    assert ServiceSpec("a", {}).stop_timeout_ms == SHUTDOWN_TIMEOUT_MS + KILL_GRACE_MS
    assert ServiceSpec("a", {}, shutdown_timeout_ms=1_000).stop_timeout_ms == 1_000 + KILL_GRACE_MS


async def test_the_shutdown_timeout_is_passed_to_the_service(tmp_path: Path) -> None:
    """The shutdown timeout is in the child's environment."""
    program = "import os, time; print(os.environ['PENSTOCK_SHUTDOWN_TIMEOUT_MS'], flush=True); time.sleep(60)"
    (tmp_path / "ends.py").write_text(program)
    stack = Stack(tmp_path, hermetic=True)
    path = {"PYTHONPATH": str(tmp_path)}
    spec = ServiceSpec("ends", {}, module="ends", environment=path, shutdown_timeout_ms=1_234)
    service = await stack.start(spec)
    log = tmp_path / "logs" / "ends.log"
    async with asyncio.timeout(30):
        while "1234" not in log.read_text():  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(0)
        await stack.stop()
    assert not service.ended


async def test_a_hermetic_service_inherits_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child gets no settings and no settings file of this process, but the Maven repository for its jars."""
    monkeypatch.setenv("PENSTOCK_LAKE", "stale")
    monkeypatch.setenv("PENSTOCK_CONFIG", "penstock.toml")
    monkeypatch.setenv("PENSTOCK_MAVEN_REPOSITORY", "https://maven.example/")
    names = ("PENSTOCK_LAKE", "PENSTOCK_CONFIG", "PENSTOCK_MAVEN_REPOSITORY")
    (tmp_path / "ends.py").write_text(f"import os; print(*(os.environ.get(name) for name in {names}))")
    stack = Stack(tmp_path, hermetic=True)
    service = await stack.start(ServiceSpec("ends", {}, module="ends", environment={"PYTHONPATH": str(tmp_path)}))
    try:
        async with asyncio.timeout(30):
            await service.wait()
        assert (tmp_path / "logs" / "ends.log").read_text().split() == ["None", os.devnull, "https://maven.example/"]
    finally:
        await stack.stop()


@pytest.mark.parametrize("health", ["<html>", "[]", "{}", "[" * 100_000])
def test_an_invalid_health_response_is_shown_as_it_is(health: str) -> None:
    """A health response that is not JSON, is nested too deeply or has no checks is returned unchanged."""
    assert failing_checks(health) == health


def test_a_connect_worker_has_the_services_settings() -> None:
    """The worker's properties have Kafka's and its own address, the common token, and its own settings."""
    settings = ConnectWorkerSettings(
        kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"),
        http=HttpSettings(host="127.0.0.1", port=2),
        auth_token=SecretStr("0123456789abcdef"),
        connect={"offset.flush.interval.ms": "9"},
        connect_files=Path("/data/files"),
    )
    found = worker_properties(settings)
    assert (found["bootstrap.servers"], found["listeners"]) == ("127.0.0.1:1", "http://127.0.0.1:2")
    assert found["connect.files.allowed"] == "/data/files"
    assert (found["rest.auth.token"], found["offset.flush.interval.ms"]) == ("0123456789abcdef", "9")


def test_a_connect_worker_requires_the_secret_of_an_admin() -> None:
    """With credentials and no token, REST needs the secret of one with the scope admin. Without one it is an error."""
    shop = Credential(secret=SecretStr("0123456789abcdef"), scopes=("ingest", "read"))
    ops = Credential(secret=SecretStr("fedcba9876543210"), scopes=("admin",))
    settings = ConnectWorkerSettings(http=HttpSettings(host="::"), credentials={"shop": shop, "ops": ops})
    assert worker_properties(settings)["rest.auth.token"] == "fedcba9876543210"
    environ = {"PENSTOCK_CREDENTIALS": '{"shop": {"secret": "0123456789abcdef", "scopes": ["ingest", "read"]}}'}
    with pytest.raises(ConfigError, match=r"credentials: .* admin"):
        ConnectWorkerSettings.load(environ=environ)


@pytest.mark.parametrize("name", ["rest.auth.token", "rest.auth.users"])
def test_a_connect_worker_may_have_credentials_of_its_own(name: str) -> None:
    """If `connect` sets the credentials of REST, no credential with the scope admin is needed."""
    shop = Credential(secret=SecretStr("0123456789abcdef"), scopes=("ingest", "read"))
    settings = ConnectWorkerSettings(credentials={"shop": shop}, connect={name: "ops:fedcba9876543210"})
    assert worker_properties(settings)[name] == "ops:fedcba9876543210"


async def test_credentials_without_an_admin_are_an_error_before_kafka_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The Connect worker would not start. Without it, credentials need no scope admin."""
    monkeypatch.setenv("PENSTOCK_CREDENTIALS", '{"shop": {"secret": "0123456789abcdef", "scopes": ["ingest"]}}')
    settings = UpSettings(http=HttpSettings(port=0), connect_port=0, topology="up_topologies:build")
    up = Up(settings, Console(quiet=True))
    up._broker = BrokerWithData()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"credentials: .* admin"):
        await up.startup()
    up = Up(settings.model_copy(update={"connect_worker": False}), Console(quiet=True))
    up._broker = BrokerWithData()  # type: ignore[assignment]
    with pytest.raises(Started):
        await up.startup()


async def test_the_gateway_sends_the_services_the_secret_of_an_admin() -> None:
    """Without a token, requests to the other services have the secret of an admin, else that of a reader."""
    shop = Credential(secret=SecretStr("0123456789abcdef"), scopes=("ingest", "read"))
    ops = Credential(secret=SecretStr("fedcba9876543210"), scopes=("admin",))
    for credentials, secret in [({"shop": shop, "ops": ops}, ops.secret), ({"shop": shop}, shop.secret)]:
        gateway = GatewayDaemon(GatewaySettings(credentials=credentials))
        assert gateway._http.headers["Authorization"] == f"Bearer {secret.get_secret_value()}"
        await gateway.shutdown()


@pytest.mark.parametrize("host", ["::1", "::"])
async def test_a_connect_worker_listens_at_an_ipv6_address(host: str) -> None:
    """The host of the services' settings may be an IPv6 address."""
    settings = ConnectWorkerSettings(http=HttpSettings(host=host, port=2), insecure_no_auth=True)
    assert worker_properties(settings)["listeners"] == f"http://[{host}]:2"
    make_connect_worker(settings)


async def test_an_invalid_setting_of_the_connect_worker_is_an_error_before_the_start() -> None:
    """An invalid setting is a ConfigError with its name before anything starts."""
    with pytest.raises(ConfigError, match=r"offset\.flush\.interval\.ms"):
        make_connect_worker(ConnectWorkerSettings(connect={"offset.flush.interval.ms": "soon"}))


def test_the_default_topology_counts_the_events_of_sessions() -> None:
    """Gap and grace are given as text, and the result has the number of a session's events."""
    driver = TopologyTestDriver(sessions("clicks", "visits", gap="10ms", grace="0ms"))
    for at in (0, 8, 25):
        driver.pipe("clicks", key=b"ann", value=b'{"n":1}', timestamp=at)
    assert [r.value for r in driver.read("visits")] == [b'{"key":"ann","start":0,"end":8,"events":2}']


def test_an_invalid_duration_of_the_default_topology_is_an_error() -> None:
    """An invalid duration is a ConfigError with its text."""
    with pytest.raises(ConfigError, match="'soon'"):
        sessions(gap="soon")
