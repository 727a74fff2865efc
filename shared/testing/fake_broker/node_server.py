"""One node's port: reads request frames and writes response frames.

As in Kafka, the requests of a connection are processed one at a time: a request that waits blocks those after it.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable, Mapping
from inspect import isawaitable

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.api_handlers import HANDLERS, supported_versions
from penstock.shared.testing.fake_broker.cluster_state import ClusterState, Node
from penstock.shared.testing.fake_broker.codec import MalformedMessage, Message
from penstock.shared.testing.fake_broker.faults import (
    Action,
    Close,
    Control,
    Delay,
    Drop,
    Fail,
    Respond,
    failed_response,
    is_action_for,
    merge_failures,
    without_partitions,
)
from penstock.shared.testing.fake_broker.handler_responses import CloseConnection, DelayedResponse, Response
from penstock.shared.testing.fake_broker.protocol import (
    SUPPORTED_APIS,
    Api,
    ErrorCode,
    Header,
    decode_header,
    encode_response,
)
from penstock.shared.testing.fake_broker.request import Request
from penstock.shared.testing.fake_broker.topics import NO_LEADER

FRAME_BYTES_MAX = 100 * 1024 * 1024
"""Kafka's `socket.request.max.bytes`: a longer request closes the connection."""

READ_AHEAD_BYTES = 4 * 1024 * 1024
"""The `limit` of a connection's reader. With more than twice as many buffered bytes, the sender has to wait."""

SASL_MECHANISMS = ["PLAIN"]
BEFORE_SASL = (Api.API_VERSIONS, Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE)

_SIZE = struct.Struct(">i")


class Silence(Exception):
    """Keep the connection open, but never answer again."""


class HangUp(Exception):
    """Close the connection."""


class NodeServer:
    """The socket of one node."""

    def __init__(
        self,
        node: Node,
        state: ClusterState,
        controls: list[Control],
        clock: Callable[[], int],
        after: Callable[[BaseException | None], None],
        users: Mapping[str, str] | None,
        ssl_context: ssl.SSLContext | None,
    ) -> None:
        self.node = node
        self._state = state
        self._controls = controls
        self._clock = clock
        self._after = after
        self._users = users
        self._ssl_context = ssl_context
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._running = asyncio.Event()
        self._running.set()

    def __repr__(self) -> str:
        word = "stopped" if self._server is None else "running" if self._running.is_set() else "paused"
        return f"<node {self.node.node_id} at {self.node.host}:{self.node.port}, {word}>"

    async def start(self) -> None:
        """Listen, after a stop on the same port."""
        self._server = await asyncio.start_server(
            self._serve_connection, self.node.host, self.node.port, limit=READ_AHEAD_BYTES, ssl=self._ssl_context
        )
        self.node.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the port and every connection, without another response."""
        server = self._server
        self._server = None
        if server is not None:
            server.close()
            await self.close_connections()
            await server.wait_closed()
            self.resume()

    async def close_connections(self) -> None:
        """Close every connection. Clients may connect again."""
        for writer in self._connections.values():
            writer.transport.abort()
        # A hook that calls this runs in the task of its own connection, which ends when the hook has returned.
        tasks = [task for task in self._connections if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def pause(self) -> None:
        """Accept connections and requests, but answer none."""
        self._running.clear()

    def resume(self) -> None:
        """Answer the requests that have arrived since `pause`, and the later ones."""
        self._running.set()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:
            # The node was stopped after it had accepted the connection.
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None, "a connection is served by a task of its own"
        self._connections[task] = writer
        try:
            await _Connection(self, reader, writer).run()
        except (asyncio.IncompleteReadError, ConnectionError, HangUp, MalformedMessage):
            pass
        except asyncio.CancelledError:
            # `close_connections` cancels this task. asyncio's streams may report a cancellation as an error.
            pass
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            # The event loop ends.
            raise
        except BaseException as e:
            # A test's hook or the broker failed. The cluster raises the error when it is closed. `pytest.fail` raises
            # an error that is no Exception.
            self._after(e)
        finally:
            del self._connections[task]
            writer.close()

    async def running(self) -> None:
        """Wait until the node is not paused."""
        await self._running.wait()

    async def decide(self, request: Request) -> Action | None:
        """The action of the hooks for a request; None if no hook acts."""
        for control in tuple(self._controls):
            if not control.is_for(request):
                continue
            action = control.hook(request)
            if isawaitable(action):
                action = await action
            # A concurrent request may have used up the hook while its action was awaited.
            if action is not None and control.is_on and is_action_for(action, request):
                control.count()
                return action
        return None

    async def respond(
        self, request: Request, action: Action | None, authenticate: Callable[[Request], Message]
    ) -> Message | None:
        """The response to a request after a hook's action; None if the client expects none.

        `authenticate` handles the two requests of SASL, since a login belongs to a connection.
        """
        while isinstance(action, Delay):
            await asyncio.sleep(action.ms / 1000)
            action = action.then
        # A hook or a delay may have held the request.
        request.now_ms = self._clock()
        if isinstance(action, Respond):
            return action.body
        if isinstance(action, Fail):
            return await self._fail_request(request, action, authenticate)
        if action is None or action.handled:
            response = await self._handle_request(request, authenticate)
        if isinstance(action, Drop):
            raise Silence
        if isinstance(action, Close):
            raise HangUp
        return response

    async def _fail_request(
        self, request: Request, action: Fail, authenticate: Callable[[Request], Message]
    ) -> Message | None:
        if request.api is Api.METADATA:
            response = await self._handle_request(request, authenticate)
            assert response is not None, "Metadata always has a response"
            for topic in response.topics:
                if action.partitions is None:
                    topic.error_code = action.code
                    topic.partitions = []
                    continue
                # A topic that does not exist has none.
                for row in getattr(topic, "partitions", ()):
                    if TopicPartition(topic.name, row.partition) in action.partitions:
                        row.error_code = action.code
                        row.leader_id = NO_LEADER
            return response
        failures = failed_response(request, action.code, action.partitions)
        if action.partitions is None and not action.handled:
            response = None
        else:
            handled_request = request if action.handled else without_partitions(request, action.partitions or ())
            response = await self._handle_request(handled_request, authenticate)
        if request.api is Api.PRODUCE and request.body.acks == 0:
            raise HangUp
        return failures if response is None or not hasattr(response, "topics") else merge_failures(response, failures)

    async def _handle_request(self, request: Request, authenticate: Callable[[Request], Message]) -> Message | None:
        if request.api in (Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE):
            return authenticate(request)
        response: Response = HANDLERS[request.api](self._state, request)
        self._after(None)
        if isinstance(response, DelayedResponse):
            waiting: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            response.then(lambda body: None if waiting.done() else waiting.set_result(body))
            response = await waiting
        if isinstance(response, CloseConnection):
            raise HangUp
        return response

    def request(self, header: Header, body: Message, client_host: str) -> Request:
        """A request in the form for handlers and hooks."""
        return Request(
            api=Api(header.api_key),
            version=header.version,
            node=self.node.node_id,
            client_id=header.client_id or "",
            client_host=client_host,
            body=body,
            now_ms=self._clock(),
        )

    def sasl_error(self, auth_bytes: bytes) -> ErrorCode:
        """Return NONE if the bytes of a PLAIN login have a user's password, else SASL_AUTHENTICATION_FAILED."""
        parts = auth_bytes.decode(errors="replace").split("\0")
        if len(parts) == 3 and (self._users or {}).get(parts[1]) == parts[2]:
            return ErrorCode.NONE
        return ErrorCode.SASL_AUTHENTICATION_FAILED

    @property
    def wants_sasl(self) -> bool:
        return self._users is not None


class _Connection:
    """One client's connection."""

    def __init__(self, server: NodeServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._is_known = not server.wants_sasl
        self._client_host = f"/{writer.get_extra_info('peername')[0]}"

    async def run(self) -> None:
        """Answer requests until the client disconnects."""
        while True:
            size = _SIZE.unpack(await self._reader.readexactly(_SIZE.size))[0]
            if not 0 < size <= FRAME_BYTES_MAX:
                raise HangUp
            frame = await self._reader.readexactly(size)
            await self._server.running()
            header = decode_header(frame)
            try:
                response = await self._respond_to_frame(frame, header)
            except Silence:
                await self._read_until_disconnect()
            await self._server.running()
            if response is not None:
                self._writer.write(_SIZE.pack(len(response)) + response)
                await self._writer.drain()

    async def _read_until_disconnect(self) -> None:
        while await self._reader.read(READ_AHEAD_BYTES):
            pass
        raise HangUp

    async def _respond_to_frame(self, frame: bytes, header: Header) -> bytes | None:
        supported = header.supported_api
        if supported is None:
            if header.api_key != Api.API_VERSIONS:
                raise HangUp
            body = supported_versions(ErrorCode.UNSUPPORTED_VERSION)
            return encode_response(SUPPORTED_APIS[Api.API_VERSIONS], 0, header.correlation_id, body)
        if not self._is_known and supported.api not in BEFORE_SASL:
            raise HangUp
        decoded, _ = supported.request.decode(frame, header.version, header.body_at)
        request = self._server.request(header, decoded, self._client_host)
        action = await self._server.decide(request)
        if self._writer.is_closing():
            raise HangUp
        response = await self._server.respond(request, action, self._authenticate)
        if response is None:
            return None
        return encode_response(supported, header.version, header.correlation_id, response)

    def _authenticate(self, request: Request) -> Message:
        if request.api is Api.SASL_HANDSHAKE:
            known = request.body.mechanism in SASL_MECHANISMS
            code = ErrorCode.NONE if known else ErrorCode.UNSUPPORTED_SASL_MECHANISM
            return Message(error_code=code, mechanisms=SASL_MECHANISMS)
        code = self._server.sasl_error(request.body.auth_bytes)
        self._is_known = self._is_known or code is ErrorCode.NONE
        message = None if code is ErrorCode.NONE else "Authentication failed: Invalid username or password"
        return Message(error_code=code, error_message=message)
