"""Consistency checks of compose.yaml, the Dockerfile, Prometheus and Grafana, without a container engine."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from penstock.services.cli import COMMANDS
from penstock.services.cli import SERVICES as SERVICE_COMMANDS
from penstock.services.connect.connectors_command import TOKEN_VARIABLE, URL_VARIABLE
from penstock.services.connect.main import SHUTDOWN_TIMEOUT_MS
from penstock.services.connect.rest_server import is_rest_open, rest_listener, worker_id_of
from penstock.services.connect.worker_command_line import misspelled_settings, read_command_line
from penstock.services.local.broker_config import KAFKA_JARS
from penstock.services.local.demo.flights import PLAN
from penstock.shared.clients.admin import event_time_topic
from penstock.shared.common.setting_names import ENV_PREFIX
from penstock.shared.common.settings import ServiceSettings
from penstock.shared.connect.herder.distributed_config import DistributedConfig

ROOT = Path(__file__).resolve().parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
DEPLOYMENT = ROOT / "docs" / "deployment.md"
BROKERS = ("kafka-1", "kafka-2", "kafka-3")
ONE_SHOT = {"topics", "connectors"}  # exits when its work is done, so it has no health check
ENDS = {"connectors", "sessions", "streams", "dlq"}
"""Commands among the services of `penstock --help` that exit when their work is done."""
SETTINGS = {
    "producer": "penstock.services.producer.settings:ProducerServiceSettings",
    "consumer": "penstock.services.consumer.settings:ConsumerServiceSettings",
    "aggregator": "penstock.services.aggregator.settings:AggregatorSettings",
    "admin": "penstock.services.admin.settings:AdminServiceSettings",
}
SECRETS = {"PENSTOCK_AUTH_TOKEN": "0123456789abcdef", "POSTGRES_PASSWORD": "a", "GRAFANA_PASSWORD": "b"}
PINNED = re.compile(r"^[\w./-]+:v?\d+\.\d+(\.\d+)?(-[\w.]+)*$")


def interpolate(value: Any) -> str:
    """Replace Compose's `${NAME:-default}` and `${NAME:?message}`; an unset variable is an error."""
    return re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", lambda m: SECRETS.get(m[1]) or m[2], str(value))


def environment(service: str) -> dict[str, str]:
    return {name: interpolate(value) for name, value in SERVICES[service].get("environment", {}).items()}


def settings_of(service: str) -> ServiceSettings:
    module, _, name = SETTINGS[service].partition(":")
    cls: type[ServiceSettings] = getattr(importlib.import_module(module), name)
    return cls.load([], environ=environment(service))


def published(service: str) -> list[tuple[str, str, str]]:
    return [tuple(port.split(":")) for port in SERVICES[service].get("ports", [])]  # type: ignore[misc]


def test_follows_the_specification() -> None:
    """compose.yaml is valid by the Compose specification's schema, which also rejects an invalid file."""
    schema = json.loads((ROOT / "tests/data/compose-spec/compose-spec.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    assert not [error.message for error in validator.iter_errors(COMPOSE)]
    wrong = {**COMPOSE, "services": {"a": {"image": "a:1.0", "imagine": "b"}}}
    assert not validator.is_valid(wrong)


def test_all_services_are_defined() -> None:
    """compose.yaml has three brokers, Spark, Postgres, each Penstock service, Prometheus and Grafana."""
    around = {"spark-master", "spark-worker", "postgres", "prometheus", "grafana"}
    assert set(SERVICES) == {*BROKERS, *SETTINGS, "connect", *around, *ONE_SHOT}


def test_every_service_of_the_document_is_defined() -> None:
    """Each service command in the table of docs/deployment.md is a compose service with the same name."""
    table = DEPLOYMENT.read_text(encoding="utf-8").partition("| command | what it does")[2].partition("\n\n")[0]
    services = {name for name, (panel, *_) in COMMANDS.items() if panel == SERVICE_COMMANDS} - ENDS
    named = {name for row in table.splitlines() for name in re.findall(r"`penstock (\w+)", row.partition(" | ")[0])}
    assert services <= named
    started = {service["command"][1] for service in SERVICES.values() if service.get("command", [""])[0] == "penstock"}
    assert services & named <= started & SERVICES.keys()


def test_images_are_pinned() -> None:
    """Each image has a version, and Penstock's image has the project's version."""
    images = {service["image"] for service in SERVICES.values()}
    assert not [
        image for image in images | set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) if not PINNED.match(image)
    ]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"penstock:{version}" in images
    assert {SERVICES[name]["image"] for name in (*SETTINGS, "connect", "connectors")} == {f"penstock:{version}"}


def test_kafka_is_the_version_of_the_embedded_one() -> None:
    """Compose runs the Kafka version that the tests run."""
    kafka_version = KAFKA_JARS.folder.removeprefix("kafka-")
    assert {SERVICES[name]["image"] for name in (*BROKERS, "topics")} == {f"apache/kafka:{kafka_version}"}


def test_ports_are_published_to_this_machine_alone() -> None:
    """Ports are published to localhost only, and no two services use the same port."""
    ports = [port for service in SERVICES for port in published(service)]
    assert {host for host, _, _ in ports} == {"127.0.0.1"}
    outside = [port for _, port, _ in ports]
    assert len(outside) == len(set(outside))


@pytest.mark.parametrize("service", SETTINGS)
def test_services_listen_on_the_published_ports(service: str) -> None:
    """A service's port is published by compose, scraped by Prometheus and used by its health check."""
    settings = settings_of(service)
    assert settings.http.host == "0.0.0.0"
    assert [inside for _, _, inside in published(service)] == [str(settings.http.port)]
    assert f"http://127.0.0.1:{settings.http.port}/health" in SERVICES[service]["healthcheck"]["test"][-1]
    scraped = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    targets = {entry["targets"][0]: entry["labels"]["service"] for job in scraped for entry in job["static_configs"]}
    assert targets[f"{service}:{settings.http.port}"] == service
    assert targets.keys() == {f"{name}:{settings.http.port}" for name in (*SETTINGS, "connect")}


def test_every_long_running_service_has_a_health_check() -> None:
    """Every service except the one-shot ones has a complete health check."""
    for name in SERVICES.keys() - ONE_SHOT:
        check = SERVICES[name]["healthcheck"]
        assert {"test", "interval", "timeout", "retries", "start_period"} <= check.keys(), name
        # Docker may set a proxy in each container, which does not reach its own address.
        assert "urllib" not in check["test"][-1] or "ProxyHandler({})" in check["test"][-1], name


def test_the_spark_worker_removes_the_jars_of_compactions() -> None:
    """By default it keeps them for a week, and compactions begin every few minutes."""
    given = SERVICES["spark-worker"]["environment"]["SPARK_WORKER_OPTS"]
    options = dict(re.findall(r"-Dspark\.worker\.cleanup\.(\w+)=(\S+)", given))
    assert options["enabled"] == "true"
    assert int(options["interval"]) + int(options["appDataTtl"]) <= 3_600


def test_volumes_are_declared_and_used() -> None:
    """Every named volume is declared and used; every mounted file is in the checkout and read-only."""
    used = {mount.split(":")[0]: mount for service in SERVICES.values() for mount in service.get("volumes", [])}
    named = {source for source in used if not source.startswith(".")}
    assert named == set(COMPOSE["volumes"])
    for source, mount in used.items():
        assert source in named or ((ROOT / source).exists() and mount.endswith(":ro")), mount


def test_stateful_services_have_volumes() -> None:
    """Brokers, database, lake, metrics and dashboards are in volumes, so recreating a container loses no data."""
    for name in (*BROKERS, "postgres", "aggregator", "spark-worker", "prometheus", "grafana"):
        assert any(not mount.startswith(".") for mount in SERVICES[name].get("volumes", [])), name


def test_dependencies_can_be_met() -> None:
    """Every dependency exists and can reach the awaited state."""
    for name, service in SERVICES.items():
        for other, entry in service.get("depends_on", {}).items():
            if entry["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], (name, other)
            else:
                assert (entry["condition"], other) == ("service_completed_successfully", "topics"), (name, other)
    assert "postgres" in SERVICES["connect"]["depends_on"]
    assert {"connect", "aggregator"} <= SERVICES["connectors"]["depends_on"].keys()
    for name in ("producer", "consumer", "aggregator"):
        assert {*BROKERS, "topics"} <= SERVICES[name]["depends_on"].keys()
    assert "spark-worker" in SERVICES["aggregator"]["depends_on"]


@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_is_a_setting(service: str) -> None:
    """Each PENSTOCK_ variable is a setting of its service."""
    settings = settings_of(service)
    variables = [name for name in environment(service) if name.startswith(ENV_PREFIX)]
    assert variables
    for variable in variables:
        at: Any = settings
        for part in variable.removeprefix(ENV_PREFIX).lower().split("__"):
            assert part in type(at).model_fields, variable
            at = getattr(at, part)


@pytest.mark.parametrize("service", SETTINGS)
def test_command_is_the_service(service: str) -> None:
    """Each service's command is its subcommand of `penstock`, with all settings in the environment."""
    assert SERVICES[service]["command"] == ["penstock", service]
    assert service in COMMANDS


@pytest.mark.parametrize("service", SETTINGS)
def test_the_stop_grace_period_covers_the_shutdown_timeout(service: str) -> None:
    """The engine kills no service before its shutdown timeout has passed."""
    assert (
        int(SERVICES[service]["stop_grace_period"].removesuffix("s")) * 1000 > settings_of(service).shutdown_timeout_ms
    )


@pytest.mark.parametrize("service", SETTINGS)
def test_services_know_every_broker(service: str) -> None:
    """Each service has all three brokers as bootstrap servers, so it can start with any of them down."""
    assert settings_of(service).kafka.bootstrap_servers.split(",") == [f"{broker}:9092" for broker in BROKERS]


@pytest.fixture
def worker(tmp_path: Path) -> DistributedConfig:
    """The Connect worker's settings, read as the worker reads them."""
    (mount,) = SERVICES["connect"]["configs"]
    penstock, connect, mode, path, *flags = SERVICES["connect"]["command"]
    assert (penstock, connect, mode, path) == ("penstock", "connect", "distributed", mount["target"])
    file = tmp_path / "connect.properties"
    file.write_text(interpolate(COMPOSE["configs"][mount["source"]]["content"]), encoding="utf-8")
    config = read_command_line("distributed", [str(file), *flags]).config
    assert isinstance(config, DistributedConfig)
    return config


def test_connect_worker_serves_the_published_port_and_token(worker: DistributedConfig) -> None:
    """The worker serves REST at the published port, with the token that admin and connectors send."""
    http = rest_listener(worker)
    assert (http.host, [inside for _, _, inside in published("connect")]) == ("0.0.0.0", [str(http.port)])
    assert worker_id_of(worker, http, http.port) == f"connect:{http.port}"
    assert f"http://127.0.0.1:{http.port}/health" in SERVICES["connect"]["healthcheck"]["test"][-1]
    variables = environment("connectors")
    assert variables[URL_VARIABLE] == f"http://connect:{http.port}"
    assert worker["rest.auth.token"].value == variables[TOKEN_VARIABLE] == SECRETS["PENSTOCK_AUTH_TOKEN"]
    admin: Any = settings_of("admin")
    assert admin.services.keys() == {*SETTINGS, "connect"} - {"admin"}
    assert admin.services["connect"] == f"http://connect:{http.port}"
    assert not is_rest_open(worker, http)


def test_connect_worker_is_set_up_for_this_cluster(worker: DistributedConfig) -> None:
    """The worker's settings are all known, include every broker, and fit into the stop grace period."""
    assert misspelled_settings(worker) == []
    assert worker.kafka.bootstrap_servers.split(",") == [f"{broker}:9092" for broker in BROKERS]
    limit_ms = worker["task.shutdown.graceful.timeout.ms"] + SHUTDOWN_TIMEOUT_MS
    assert int(SERVICES["connect"]["stop_grace_period"].removesuffix("s")) * 1000 > limit_ms


def test_connector_uses_composes_postgres(worker: DistributedConfig) -> None:
    """The connector writes the demo's results to compose's database, with the password that both get."""
    (mount,) = SERVICES["connectors"]["volumes"]
    folder, target = mount.split(":")[:2]
    penstock, connectors, create, update, path = SERVICES["connectors"]["command"]
    assert (penstock, connectors, create, update) == ("penstock", "connectors", "create", "--update")
    config = json.loads((ROOT / folder / Path(path).relative_to(target)).read_text(encoding="utf-8"))
    assert config["topics"] == PLAN.results
    database = environment("postgres")
    assert config["connection.url"] == f"postgresql://postgres:5432/{database['POSTGRES_DB']}"
    assert config["connection.user"] == database["POSTGRES_USER"]
    assert config["connection.password"] == "${env:POSTGRES_PASSWORD}"
    assert environment("connect") == {"POSTGRES_PASSWORD": database["POSTGRES_PASSWORD"]}
    assert worker["config.providers"] == ["env"]
    assert worker.props["config.providers.env.param.allowlist.pattern"] == "POSTGRES_PASSWORD"


def test_brokers_form_one_cluster() -> None:
    """The brokers differ in id and addresses alone, all are voters, and two replicas must be in sync."""
    environments = [environment(broker) for broker in BROKERS]
    own = {"KAFKA_NODE_ID", "KAFKA_LISTENERS", "KAFKA_ADVERTISED_LISTENERS"}
    assert len({tuple(sorted((k, v) for k, v in e.items() if k not in own)) for e in environments}) == 1
    voters = environments[0]["KAFKA_CONTROLLER_QUORUM_VOTERS"].split(",")
    assert voters == [f"{e['KAFKA_NODE_ID']}@{broker}:9093" for broker, e in zip(BROKERS, environments, strict=True)]
    for broker, e in zip(BROKERS, environments, strict=True):
        ((_, _, port),) = published(broker)
        assert e["KAFKA_ADVERTISED_LISTENERS"] == f"INTERNAL://{broker}:9092,EXTERNAL://localhost:{port}"
        assert e["KAFKA_LISTENERS"] == f"INTERNAL://:9092,CONTROLLER://:9093,EXTERNAL://:{port}"
    for name in ("DEFAULT", "OFFSETS_TOPIC", "TRANSACTION_STATE_LOG"):
        assert environments[0][f"KAFKA_{name}_REPLICATION_FACTOR"] == "3"
    assert environments[0]["KAFKA_MIN_INSYNC_REPLICAS"] == "2"
    assert environments[0]["KAFKA_LOG_DIRS"] == SERVICES["kafka-1"]["volumes"][0].split(":")[1]


def test_source_topic_keeps_old_event_times() -> None:
    """The source topic is created with the configs of an event-time topic."""
    command = SERVICES["topics"]["command"]
    configs = dict(part.removeprefix("--config=").split("=") for part in command if part.startswith("--config="))
    assert configs == event_time_topic("flights", 4).configs
    assert "--if-not-exists" in command
    assert f"--topic={PLAN.topic}" in command


def test_services_are_configured_as_in_the_demo() -> None:
    """The services have the demo's topics, key, event time, topology and handler."""
    producer: Any = settings_of("producer")
    consumer: Any = settings_of("consumer")
    aggregator: Any = settings_of("aggregator")
    assert producer.ingest.topics.keys() == {PLAN.topic}
    taken = producer.ingest.for_topic(PLAN.topic)
    assert (taken.allowed, taken.key, taken.time) == (True, PLAN.key, PLAN.time)
    assert not producer.ingest.for_topic("another").allowed
    assert (aggregator.topology, aggregator.streams.application_id) == (PLAN.topology, PLAN.application)
    assert (consumer.topics, consumer.handler) == ((PLAN.results,), PLAN.handler)


def test_written_folders_are_volumes() -> None:
    """Folders that services write to are volumes, and the image creates them, so that its user owns them."""
    for name in (*SETTINGS, "spark-worker"):
        for mount in SERVICES[name].get("volumes", ()):
            assert re.search(rf"install -d .*{re.escape(mount.split(':')[1])}( |$)", DOCKERFILE, re.MULTILINE), mount
    notable = environment("consumer")["NOTABLE_FILE"]
    assert [notable.startswith(mount.split(":")[1]) for mount in SERVICES["consumer"]["volumes"]] == [True]


def test_spark_and_aggregator_share_the_lake() -> None:
    """The driver in the aggregator and the executors in the worker have the same Delta tables at the same path."""
    settings: Any = settings_of("aggregator")
    mounts = {tuple(SERVICES[name]["volumes"]) for name in ("aggregator", "spark-worker")}
    assert mounts == {(f"lake:{settings.streams.lake}",)}
    assert settings.compaction.spark.master == SERVICES["spark-worker"]["command"][-1]
    master = SERVICES["spark-master"]["command"]
    assert (
        settings.compaction.spark.master
        == f"spark://{master[master.index('--host') + 1]}:{master[master.index('--port') + 1]}"
    )


def test_copied_files_exist_and_are_in_the_build_context() -> None:
    """Everything that the Dockerfile copies exists and passes .dockerignore, and the image does not run as root."""
    passed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")
    }
    copied = {
        name for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]
    }
    assert copied == passed
    assert not [name for name in copied if not (ROOT / name).exists()]
    assert re.findall(r"^USER (\w+)$", DOCKERFILE, re.MULTILINE)[-1] != "root"


def test_image_has_the_versions_of_the_lock() -> None:
    """The image installs pins of requirements.lock, all with hashes, and no development tool."""

    def pins(path: str) -> set[str]:
        text = (ROOT / path).read_text(encoding="utf-8").replace("\\\n", "")
        assert all("--hash=sha256:" in line for line in text.splitlines())
        return {line.split(" --hash")[0].strip() for line in text.splitlines()}

    image, everything = pins("deploy/requirements.lock"), pins("requirements.lock")
    assert image <= everything
    assert not {"pytest", "mypy", "ruff"} & {pin.split("==")[0] for pin in image}


def test_grafana_is_provisioned() -> None:
    """Grafana is provisioned with Prometheus and the dashboard."""
    provisioning = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text(encoding="utf-8"))["datasources"]
    assert source["url"] == f"http://prometheus:{published('prometheus')[0][2]}"
    (provider,) = yaml.safe_load((provisioning / "dashboards/penstock.yml").read_text(encoding="utf-8"))["providers"]
    mounts = dict(mount.split(":")[:2][::-1] for mount in SERVICES["grafana"]["volumes"])
    assert mounts[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/penstock.json").read_text(encoding="utf-8"))
    assert {target["datasource"]["uid"] for panel in dashboard["panels"] for target in panel["targets"]} == {
        source["uid"]
    }
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
