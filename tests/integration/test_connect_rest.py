"""Our distributed worker beside the recording of a real Kafka Connect: the same requests, the same answers.

Free to differ: who and where the worker is, lists of plugins and of settings, the order of what stands for a set, texts
that quote Java, and the status of malformed bodies, which here is 400.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.local.kafka import EmbeddedKafka
from shared.clients.admin import Admin, NewTopic
from shared.common.settings import KafkaSettings
from tests.integration.connect_worker import properties, running

RECORDING = Path(__file__).parents[1] / "data" / "kafka_connect_rest.jsonl.gz"
POLL_S, WAIT_S, SETTLE_POLLS = 0.05, 30, 100
FREE = ("worker_id", "commit", "kafka_cluster_id", "documentation", "recommended_values")
JAVA = ("org.apache.kafka", "java.util", "Unexpected character", "Unrecognized field", "Cannot construct")


def recorded() -> list[dict[str, Any]]:
    with gzip.open(RECORDING, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def comparable(value: Any) -> Any:
    """Without what is free to differ, and with lists of offsets in order."""
    if isinstance(value, dict):
        found = {name: comparable(item) for name, item in value.items() if name not in FREE}
        if isinstance(found.get("offsets"), list):
            found["offsets"].sort(key=json.dumps)
        return found
    return [comparable(item) for item in value] if isinstance(value, list) else value


def expected(line: dict[str, Any]) -> tuple[int, Any]:
    """Status and body that ours must have; the body None where it is free."""
    status, body = line["status"], comparable(line["response"])
    said = body.get("message", "") if isinstance(body, dict) and "error_code" in body else ""
    if status == 500 and not line["path"].endswith("/validate"):
        return 400, None
    if any(word in said for word in JAVA) or line["path"].startswith("/connector-plugins"):
        return status, None
    return status, body


async def wait_for(client: httpx.AsyncClient, path: str, predicate: str) -> None:
    """Poll until the recording's own predicate holds of the body."""
    body: Any = None
    async with asyncio.timeout(WAIT_S):
        while True:
            answer = await client.get(path)
            body = answer.json()
            try:
                if answer.status_code == 200 and eval(predicate, {"b": body}):
                    return
            except (KeyError, IndexError, TypeError):
                pass
            await asyncio.sleep(POLL_S)


async def settled(client: httpx.AsyncClient, path: str, scratch: Path, wanted: Any, answer: Any) -> httpx.Response:
    """The answer once it is what was recorded, or after a while: what is written beside a request takes a moment."""
    for _ in range(SETTLE_POLLS):
        if comparable(json.loads(answer.text.replace(str(scratch), "SCRATCH"))) == wanted:
            break
        await asyncio.sleep(POLL_S)
        answer = await client.get(path)
    found: httpx.Response = answer
    return found


async def replay(client: httpx.AsyncClient, scratch: Path) -> list[str]:
    """Send the recorded requests; gives what is answered otherwise."""
    differences = []
    for number, line in enumerate(recorded()):
        if "wait" in line:
            try:
                await wait_for(client, line["wait"], line["until"])
            except TimeoutError:
                found = (await client.get(line["wait"])).text
                differences.append(f"{number}: {line['wait']} never became {line['until']}: {found}")
            continue
        body = line.get("raw_body") or (json.dumps(line["body"]) if "body" in line else None)
        content = None if body is None else body.replace("SCRATCH", str(scratch))
        answer = await client.request(line["method"], line["path"], content=content)
        status, wanted = expected(line)
        if line["method"] == "GET" and wanted is not None and answer.status_code == status:
            answer = await settled(client, line["path"], scratch, wanted, answer)
        found = json.loads(answer.text.replace(str(scratch), "SCRATCH")) if answer.content else None
        if answer.status_code != status:
            differences.append(
                f"{number}: {line['method']} {line['path']}: {answer.status_code}, not {status}: {found}"
            )
        elif wanted is not None and comparable(found) != wanted:
            differences.append(f"{number}: {line['method']} {line['path']}: {found}, not {wanted}")
        elif status >= 400 and (found is None or set(found) != {"error_code", "message"}):
            differences.append(f"{number}: {line['method']} {line['path']}: no error body: {found}")
        location = answer.headers.get("location", "").replace(str(client.base_url).rstrip("/"), "")
        if location != line.get("location", ""):
            differences.append(f"{number}: location {location!r}, not {line.get('location')!r}")
    return differences


@pytest.mark.soak
async def test_the_recorded_script_is_answered_alike(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    """111 exchanges: every status is Kafka Connect's, and so is every body but for what is free."""
    (tmp_path / "in.txt").write_text("alpha\nbeta\ngamma\n")
    (tmp_path / "out.txt").touch()
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic("oracle-lines", 2)], exist_ok=True)
    async with running(tmp_path, properties(kafka.bootstrap_servers)) as client:
        differences = await replay(client, tmp_path)
    assert not differences, "\n" + "\n".join(differences)
