"""`penstock[postgres]`: the sink reports an invalid setting, and an unreachable database is a retriable error."""

import asyncio
import socket

from penstock.connect import RetriableError
from penstock.connect.connectors import PostgresSinkConnector


async def main() -> None:
    wrong = {"connection.url": "postgres://shop", "topics": "orders", "insert.mode": "nonsense"}
    print([value.name for value in PostgresSinkConnector().validate(wrong) if value.errors])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"postgres://127.0.0.1:{taken.getsockname()[1]}/shop"
        try:
            await PostgresSinkConnector.task_class().start({"connection.url": url, "topics": "orders"})
        except RetriableError as e:
            print(type(e.__cause__).__name__)


if __name__ == "__main__":
    asyncio.run(main())
