"""The dashboard in a headless Chromium, with a gateway on a real broker: pages open, values change and buttons work."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, Request, Response

from penstock.api.http.app import create_app
from penstock.api.http.json_response import json_response
from penstock.api.http.server import HttpServer
from penstock.api.streams.routes import streams_router
from penstock.api.streams.task_views import CompactionState, OpenWindows, StreamsState, TaskState, WindowRow
from penstock.services.local.gateway import GatewayDaemon
from penstock.services.local.settings import GatewaySettings
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.dead_letters.dead_letter import DeadLetter, dead_letter_record
from penstock.shared.clients.producer import Producer
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.records import ConsumerRecord, OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import HttpSettings, KafkaSettings
from tests.api.streams.test_queries import STATE
from tests.http_client import http_client
from tests.integration.chromium import Page, chromium, find_chromium
from tests.integration.test_http_ingest import NDJSON, create, healthy
from tests.shared_broker import Broker

PICTURES = os.environ.get("PENSTOCK_TEST_PICTURES", "")
"""A folder for a screenshot of each page; docs/ contains the latest ones."""
PAGES = ("overview", "groups", "streams", "sessions", "connectors", "compactions", "dead-letters")

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium (Debian's package: chromium)")


class Streams:
    """Two open sessions, a rising count of late records, and compactions that run until the test ends them."""

    def __init__(self) -> None:
        self.late, self.compactions = 0, list[CompactionState]()

    async def describe(self) -> StreamsState:
        self.late += 3
        now_ms = SYSTEM_CLOCK.now_ms()
        task = TaskState(
            partition=0,
            state="running",
            instance="a",
            stream_time_ms=now_ms - 60_000,
            state_rows=2,
            late_records=self.late,
        )
        return {**STATE, "tasks": [task], "compactions": [*self.compactions]}

    def stores(self) -> list[dict[str, Any]]:
        return [{"store": "sessions", "rows": {"0": 2}, "total": 2}]

    def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> OpenWindows:
        at_ms = SYSTEM_CLOCK.now_ms() - 600_000
        last = {"n": 3, "id": -1234567890123456789, "text": '"1234567890123456789'}
        ann = WindowRow(store="sessions", partition=0, key="ann", start_ms=at_ms, end_ms=at_ms + 240_000, results=last)
        bob = WindowRow(
            store="sessions", partition=0, key="bob", start_ms=at_ms, end_ms=at_ms + 90_000, results={"n": 1}
        )
        if continuation == "bob-next":
            return {"windows": [bob], "continuation": None, "unseen": 0}
        found = [row for row in (ann, bob) if key in row["key"]][:limit]
        return {"windows": found, "continuation": None if key else "bob-next", "unseen": 0 if key else 7_000_000}

    def compact(self) -> str:
        if any(one["status"] == "running" for one in self.compactions):
            return "one is running"
        self.compactions.insert(0, CompactionState(started_at_ms=SYSTEM_CLOCK.now_ms(), status="running"))
        return ""

    def finish(self) -> None:
        self.compactions[0] |= CompactionState(status="done", seconds=1.5, rows=42)


class OtherServices:
    """The services behind the gateway: streams, and a connector with a failed task."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.streams = Streams()
        router = APIRouter()
        router.add_api_route("/connectors", self.connectors)
        router.add_api_route("/connectors/{rest:path}", self.steer, methods=["POST", "PUT"])
        router.add_api_route("/health", lambda: {"status": "ok", "checks": {}})
        router.add_api_route("/metrics", lambda: Response(""))
        self.server = HttpServer(create_app(streams=streams_router(self.streams), more=[router]), HttpSettings())

    async def connectors(self) -> Response:
        task = {"id": 0, "state": "FAILED", "worker_id": "w:1", "trace": "boom at line 7"}
        connector = {"state": "RUNNING", "worker_id": "w:1"}
        return json_response({"files": {"status": {"name": "files", "connector": connector, "tasks": [task]}}})

    async def steer(self, rest: str, request: Request) -> Response:
        self.requests.append((request.method, rest))
        return Response(status_code=204)


@asynccontextmanager
async def gateway(bootstrap_servers: str, others: OtherServices, **given: Any) -> AsyncIterator[str]:
    """Run a gateway in front of the other services, and yield its address."""
    await others.server.start()
    services = {"aggregator": others.server.url, "connect": others.server.url}
    settings = {"kafka": {"bootstrap_servers": bootstrap_servers}, "http": {"port": 0}, "gateway_services": services}
    daemon = GatewayDaemon(GatewaySettings.model_validate(settings | given))
    await daemon.startup()
    working = asyncio.create_task(daemon.main_loop())
    try:
        async with http_client(base_url=daemon.server.url) as client:
            await healthy(client, 200)
        yield daemon.server.url
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await daemon.shutdown()
        await others.server.stop(1_000)


async def text_of(page: Page, id_: str) -> str:
    return str(await page.run(f"document.getElementById('{id_}').textContent"))


async def press(page: Page, label: str, within: str, row: str = "") -> None:
    """Press the button with a label; `row` selects the table row, since tests share a broker."""
    selector = f"#{within} tr" if row else f"#{within}"
    buttons = f"[...document.querySelectorAll('{selector}')].filter(e => e.textContent.includes('{row}'))"
    wanted = f"{buttons}.flatMap(e => [...e.querySelectorAll('button')]).find(b => b.textContent === '{label}')"
    await page.until(f"!!{wanted}")
    await page.run(f"{wanted}.click()")


async def search_by_key(page: Page) -> None:
    """`/` opens the sessions from any page and focuses the search; the rate of late records rises meanwhile."""
    await page.until("Number(document.getElementById('laterate').textContent) > 0")
    await page.key("/")
    await page.until("document.getElementById('windows').textContent.includes('ann')")
    shown = r'{"n":3,"id":"-1234567890123456789","text":"\"1234567890123456789"}'
    assert shown in await text_of(page, "windows"), "an integer beyond 2^53 has all digits"
    for key in "bob":
        await page.key(key)
    await page.until("!document.getElementById('windows').textContent.includes('ann')")
    assert "1 with bob" in await text_of(page, "sessions-note")
    assert await page.run("document.querySelectorAll('#windows-line rect').length") == 1
    assert "more" not in await text_of(page, "sessions-note")
    clear = "(() => { const at = document.getElementById('search'); at.value = ''; at.blur(); return true; })()"
    assert await page.run(clear)


async def turn_pages(page: Page) -> None:
    """Sessions that do not fit on one page follow on the next, and the note counts rows that were not searched."""
    await page.run("location.hash = 'sessions'; true")
    await page.until("document.getElementById('sessions-note').textContent.includes('more follow; ')")
    assert re.search(r"7.000.000 more rows were not searched", await text_of(page, "sessions-note"))
    await page.run("document.getElementById('windows-next').click()")
    await page.until("document.getElementById('sessions-note').textContent.endsWith('first, page 2')")
    assert "ann" not in await text_of(page, "windows")
    assert await page.run("document.getElementById('windows-next').hidden")
    await page.run("document.getElementById('windows-first').click()")
    await page.until("document.getElementById('windows').textContent.includes('ann')")


async def a_group_catches_up(page: Page, servers: str, topic: str) -> None:
    """The page shows a group's lag; after a consumer has joined and read, it shows the rebalance and no lag."""
    group, kafka = f"0-{topic}-readers", KafkaSettings(bootstrap_servers=servers)  # the page shows the first 50 groups
    async with Admin(kafka) as admin:
        await admin.reset_group_offsets(group, "earliest", [TopicPartition(topic, 0)])
    row = f"[...document.querySelectorAll('#groups tr')].find(e => e.textContent.includes('{group}'))"
    cells = f"[...({row}).cells].map(c => c.textContent)"
    await page.run("location.hash = 'groups'")
    await page.until(f"!!{row}")
    assert (await page.run(cells))[3] == "41"
    own = ConsumerSettings(group_id=group, auto_offset_reset="earliest", commit_strategy="none")
    async with Consumer(kafka, own) as consumer:
        consumer.subscribe([topic])
        async with asyncio.timeout(60):
            while await consumer.committed(TopicPartition(topic, 0)) != OffsetAndMetadata(41):
                if await consumer.poll(200):
                    await consumer.commit()
        await page.until(f"{cells}[2] === '1' && {cells}[3] === '0' && {cells}[5] === '0.0 s'")
    mine = f"[...document.querySelectorAll('#rebalances tr')].filter(e => e.textContent.includes('{group}'))"
    await page.until(f"{mine}.length > 0 && document.querySelectorAll('#rebalance-line rect').length > 0")
    assert "members 0 to 1" in await page.run(f"{mine}.map(e => e.textContent).join()")


async def a_compaction_runs(page: Page, streams: Streams) -> None:
    """The button starts a compaction, a second one is rejected while it runs, and its result is shown."""
    await page.run("location.hash = 'compactions'")
    await press(page, "Start a compaction", "main")
    await page.until("document.getElementById('compactions').textContent.includes('running')")
    await press(page, "Start a compaction", "main")
    await page.until("document.getElementById('outcome').textContent.includes('one is running')")
    streams.finish()
    await page.until("document.getElementById('compactions').textContent.includes('done')")
    assert (await text_of(page, "compactions")).endswith("42")


async def test_all_pages_and_buttons(kafka: Broker, topic_name: str, tmp_path: Path) -> None:
    """Every page opens without an error, values update, charts survive a reload, and buttons work."""
    servers, others = kafka.bootstrap_servers, OtherServices()
    topic_name = "flights" if PICTURES else topic_name
    dead = f"{topic_name}-dlq"
    await create(servers, event_time_topic(topic_name, 1))
    await create(servers, event_time_topic(dead, 1))
    source = ConsumerRecord(topic_name, 0, 7, 1_000, b"ann", b"broken")
    dead_letter = DeadLetter(source, "process", "ValueError", "cannot be handled", attempts=3, group="banks")
    async with Producer(KafkaSettings(bootstrap_servers=servers)) as producer:
        await (await producer.send_many([dead_letter_record(dead, dead_letter)]))
    async with gateway(servers, others) as url, chromium(tmp_path / "profile") as browser:
        async with http_client(base_url=url) as client:
            await client.post(f"/v1/topics/{topic_name}/events", content=b"1\n", headers=NDJSON)
            page = await browser.page()
            await page.size(1280, 720)
            await page.open(url)
            await page.until("document.getElementById('connection').textContent === 'connected'")
            before = int((await text_of(page, "stored")).replace(",", ""))
            response = await client.post(f"/v1/topics/{topic_name}/events", content=b"2\n" * 40, headers=NDJSON)
            assert response.status_code == 200
            await page.until(f"document.getElementById('stored').textContent === '{before + 40}'")
        assert await page.run("moment(1717200000000000000)") == "1717200000000000000 ms"
        await search_by_key(page)
        await turn_pages(page)
        await a_group_catches_up(page, servers, topic_name)
        await page.run("location.hash = 'connectors'")
        await page.until("document.getElementById('connectors').textContent.includes('boom at line 7')")
        await press(page, "pause", "connectors")
        await press(page, "restart", "connectors")
        await page.until("document.getElementById('outcome').textContent.includes('restart files: done')")
        assert ("PUT", "files/pause") in others.requests
        assert ("POST", "files/restart") in others.requests
        await page.run("location.hash = 'dead-letters'")
        await press(page, "show", "dead-letters", dead)
        await page.until("document.getElementById('records').textContent.includes('cannot be handled')")
        await press(page, "replay", "dead-letters", dead)
        await page.until("document.getElementById('outcome').textContent.includes('1 sent, 0 failed')")
        await a_compaction_runs(page, others.streams)
        for name in PAGES:
            await page.key(str(PAGES.index(name) + 1))
            await page.until(f"location.hash === '#{name}' || '{name}' === 'overview'")
            assert await page.run("[...document.querySelectorAll('main > :not([hidden])')].length") > 0
            if PICTURES:
                await asyncio.sleep(6)
                await page.picture(Path(PICTURES) / f"dashboard-{name}.png")
        await page.open(f"{url}/#overview")
        await page.run("location.reload()")
        await page.until("!!document.querySelector('#chart-rate polyline')")
        await page.size(360, 700, dark=True)
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")
        assert await page.run("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 27)"
        assert page.errors == []


async def test_the_token_is_required_and_never_shown(kafka: Broker, tmp_path: Path) -> None:
    """The page requires the token, and neither the page nor any response contains it."""
    token = "a-token-of-enough-length"
    others = OtherServices()
    async with gateway(kafka.bootstrap_servers, others, auth_token=token) as url:
        async with chromium(tmp_path / "profile") as browser:
            page = await browser.page()
            await page.open(url)
            await page.until("!document.getElementById('login').hidden")
            await page.run(f"document.getElementById('token').value = '{token}'")
            await page.run("document.querySelector('#login button').click()")
            await page.until("document.getElementById('connection').textContent === 'connected'")
            await page.run("document.getElementById('token').value = ''")
            assert token not in await page.run("document.documentElement.outerHTML")
        async with http_client(base_url=url) as client:
            await healthy(client, 200)
            headers = {"Authorization": f"Bearer {token}"}
            for path in ("/", "/health", "/metrics", "/v1/overview", "/v1/history", "/openapi.json", "/v1/topics"):
                response = await client.get(path, headers=headers)
                assert (response.status_code, token in response.text) == (200, False)
