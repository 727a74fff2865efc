"""The HTTP API of dead letters, over an implementation in memory."""

from __future__ import annotations

from typing import Any

import httpx

from penstock.api.admin.dead_letters import dead_letters_router
from penstock.api.http.app import create_app


class MemoryDeadLetters:
    """Implements `DeadLetters`; `request` holds the arguments of the last replay."""

    def __init__(self) -> None:
        self.request: dict[str, Any] = {}

    async def topics(self) -> list[dict[str, Any]]:
        return [{"topic": "t-dlq", "kind": "dead_letters", "source": "t", "records": 3, "exact": True}]

    async def read_newest(self, topic: str, limit: int, stage: str | None) -> dict[str, Any]:
        row = {"partition": 0, "written_ms": 1, "key": None, "value": "{", "headers": [], "stage": stage or "process"}
        return {"records": [row | {"offset": i} for i in range(limit)], "scanned": 7}

    async def replay(self, topic: str, **request: Any) -> dict[str, Any]:
        self.request = request
        return {"sent": 2, "failed": 0}


async def test_dead_letters_are_listed_scanned_and_replayed() -> None:
    """Dead letters are listed, read and replayed; invalid limits and stages and unknown fields are 400s."""
    dead_letters = MemoryDeadLetters()
    app = create_app(more=[dead_letters_router(dead_letters)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        assert (await client.get("/v1/dead-letters")).json()["topics"][0]["records"] == 3
        assert len((await client.get("/v1/dead-letters/t-dlq?limit=2")).json()["records"]) == 2
        assert (await client.get("/v1/dead-letters/t-dlq?stage=produce")).json()["records"][0]["stage"] == "produce"
        for query in ("limit=0", "stage=nowhere"):
            assert (await client.get(f"/v1/dead-letters/t-dlq?{query}")).status_code == 400
        await client.post("/v1/dead-letters/t-late/replay", json={"to": "corrections"})
        assert dead_letters.request["to"] == "corrections"
        response = await client.post("/v1/dead-letters/t-dlq/replay", json={"stage": "process", "limit": 5})
        assert response.json() == {"topic": "t-dlq", "dry_run": False, "sent": 2, "failed": 0}
        request = dead_letters.request
        assert (request["stage"], request["limit"], request["include_replayed"]) == ("process", 5, False)
        assert (await client.post("/v1/dead-letters/t-dlq/replay", json={"stages": 1})).status_code == 400
