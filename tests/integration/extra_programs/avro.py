"""`penstock[avro]`: a struct is converted to Avro and back, with its schema in a registry in this process."""

import asyncio
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

from penstock.connect import Field, MoreNeeded, Schema, SchemaType
from penstock.connect.converters import AvroConverter

T = TypeVar("T")
ORDER = Schema.struct("shop.Order", Field("id", Schema(SchemaType.INT64)), Field("item", Schema(SchemaType.STRING)))


class Registry(BaseHTTPRequestHandler):
    """A schema registry that holds one schema."""

    schema = ""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Registry.schema = json.loads(body)["schema"]
        self._respond({"id": 7})

    def do_GET(self) -> None:
        self._respond({"schema": self.schema})

    def _respond(self, body: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


async def converted(convert: Callable[[], T]) -> T:
    """Repeat a conversion until it has fetched the schemas that it needs, and return its result."""
    while True:
        try:
            return convert()
        except MoreNeeded as e:
            await e.fetch()


async def main() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever).start()
        settings = {"schema.registry.url": f"http://127.0.0.1:{server.server_port}"}
        writer, reader = AvroConverter(), AvroConverter()
        writer.configure(settings, is_key=False)
        reader.configure(settings, is_key=False)
        data = await converted(lambda: writer.from_connect_data("orders", ORDER, {"id": 1, "item": "tea"}))
        schema, value = await converted(lambda: reader.to_connect_data("orders", data))
        server.shutdown()
    print(data, schema == ORDER, value)


if __name__ == "__main__":
    asyncio.run(main())
