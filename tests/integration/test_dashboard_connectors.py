"""The dashboard's page of connectors in a headless Chromium, with a real Connect worker behind the gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.chromium import chromium, find_chromium
from tests.integration.connect_worker import properties, running
from tests.integration.test_connect_workers import make_topic, source, until
from tests.integration.test_http_dashboard import OtherServices, gateway, press
from tests.shared_broker import Broker

TOKEN = "a-token-of-enough-length"

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium (Debian's package: chromium)")


async def test_the_page_controls_a_workers_connectors(kafka: Broker, tmp_path: Path, topic_name: str) -> None:
    """The page shows a running connector and a failed task with its trace, and its buttons control the worker, which
    requires the page's token.
    """
    await make_topic(kafka, topic_name)
    (tmp_path / "in.txt").write_text("a\n")
    async with running(tmp_path, properties(kafka.bootstrap_servers, rest_auth_token=TOKEN)) as worker:
        services = {"connect": str(worker.base_url).rstrip("/")}
        await worker.put("/connectors/good/config", json=source(tmp_path / "in.txt", topic_name))
        bad = source(tmp_path / "in.txt", topic_name, transforms="no", transforms_no_type="Cast$Value")
        bad |= {
            "transforms.no.spec": "int8",
            "value.converter": "org.apache.kafka.connect.converters.ByteArrayConverter",
        }
        await worker.put("/connectors/bad/config", json=bad)
        await until(worker, "/connectors/bad/status", lambda status: status["tasks"][0]["state"] == "FAILED")
        others = OtherServices()
        async with (
            gateway(kafka.bootstrap_servers, others, gateway_services=services, auth_token=TOKEN) as url,
            chromium(tmp_path / "profile") as browser,
        ):
            page = await browser.page()
            await page.open(f"{url}/#connectors")
            await page.until("document.getElementById('login') && !document.getElementById('login').hidden")
            await page.run(f"document.getElementById('token').value = '{TOKEN}'")
            await page.run("document.querySelector('#login button').click()")
            table = "document.getElementById('connectors').textContent"
            await page.until(f"{table}.includes('good / 0') && {table}.includes('RUNNING')")
            await page.until(f"{table}.includes('bad / 0') && {table}.includes('FAILED')")
            await page.until(f"{table}.includes('Traceback')")
            await press(page, "pause", "connectors")  # in the first row: connectors are sorted by name
            await until(worker, "/connectors/bad/status", lambda status: status["connector"]["state"] == "PAUSED")
            await press(page, "resume", "connectors")
            await until(worker, "/connectors/bad/status", lambda status: status["connector"]["state"] == "RUNNING")
            await worker.put("/connectors/bad/stop")
            await until(worker, "/connectors/bad/status", lambda status: status["connector"]["state"] == "STOPPED")
            await press(page, "resume", "connectors")
            await until(worker, "/connectors/bad/status", lambda status: status["connector"]["state"] == "RUNNING")
            await press(page, "restart", "connectors")
            await page.until("document.getElementById('outcome').textContent.includes('restart bad: done')")
            assert page.errors == []
