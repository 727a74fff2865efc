"""Parses a request to Kafka Connect's REST API: its body, its path and its boolean query parameters.

Functions raise BadRequest for an invalid body. The app's outermost middleware is here as well. It removes trailing
slashes from paths, and distinguishes slashes within names from separators. It rejects paths that cannot be decoded.
While the worker is starting up, it answers 503 to all paths but those in WHILE_STARTING.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import unquote, unquote_to_bytes

from fastapi import Depends, Path, Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.connect.errors import error_response, starting_response
from penstock.api.http.json_response import JSON_TYPE
from penstock.api.http.status_codes import BAD_REQUEST, NOT_FOUND, UNSUPPORTED_MEDIA_TYPE
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.connect.errors import BadRequest
from penstock.shared.connect.properties import decode_settings, properties_from_json
from penstock.shared.connect.runtime.create_request import check_name
from penstock.shared.connect.runtime.task_thread import connector_errors

SLASH = "\x00"
"""Replaces, in a path's segment, a slash that was written as %2F. A path with %00 is rejected."""
_WRONG_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})|%00")

TASK_DIGITS_MAX = 10
"""The length of the largest number of a task, a signed integer of 32 bits."""
WHILE_STARTING = frozenset({"/", "/metrics"})


async def settings_body(request: Request) -> Any:
    """Return the body as `decode_settings` decodes it, and otherwise as `json_body` does."""
    return await json_body(request, decode_settings)


async def json_body(request: Request, decode: Callable[[bytes], Any] = decode_json) -> Any:
    """Return the decoded body. Raises BadRequest for an empty body.

    The content type may be missing. For a body that is not empty, raises HTTPException (415) for any other type than
    application/json.
    """
    body = await request.body()
    if not body.strip():
        raise BadRequest("The body is empty")
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in ("", JSON_TYPE):
        raise HTTPException(UNSUPPORTED_MEDIA_TYPE, f"Content-Type must be {JSON_TYPE}, not {content_type[:60]}")
    return _parse_json_body(body, decode)


def json_list(body: bytes) -> list[Any]:
    """Return the elements of a body that must be a JSON array, decoded by `decode_settings`."""
    elements = _parse_json_body(body, decode_settings)
    if not isinstance(elements, list):
        raise BadRequest("The body must be a JSON array")
    return elements


def _parse_json_body(body: bytes, decode: Callable[[bytes], Any]) -> Any:
    try:
        return decode(body)
    except InvalidJson as e:
        raise BadRequest(f"The body is not JSON: {e}") from None


def patch_of(body: Any, name: str) -> dict[str, str | None]:
    """Return the changes to a connector's config. None removes a setting."""
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object of settings")
    patch: dict[str, str | None] = {
        **properties_from_json(body, "config"),
        **{key: None for key in body if body[key] is None},
    }
    check_name(patch.get("name"), name)
    return patch


async def name_of(name: Annotated[str, Path(examples=["files"])]) -> str:
    """Return the name of a connector, plugin or logger in the path."""
    return name.replace(SLASH, "/")


async def task_number(task: Annotated[str, Path(examples=["0"])]) -> int:
    """Return the number of a task in the path. Raises HTTPException (404, as for unknown paths) for other text."""
    if not (task.isascii() and task.isdigit() and len(task) <= TASK_DIGITS_MAX):
        raise HTTPException(NOT_FOUND, "Not Found")
    return int(task)


Name = Annotated[str, Depends(name_of)]
TaskNumber = Annotated[int, Depends(task_number)]


def flag(request: Request, name: str, default: bool = False) -> bool:
    """Return a boolean query parameter, or `default` if the request does not have it.

    `true` in upper or lower case is true, and any other value is false.
    """
    value = request.query_params.get(name)
    return default if value is None else value.lower() == "true"


class ConnectPaths:
    """The outermost middleware of the app. It normalizes the paths of requests as Kafka Connect does.

    Until the herder is ready, it answers 503 to all paths but those in WHILE_STARTING.
    """

    def __init__(self, app: ASGIApp, is_ready: Callable[[], bool]) -> None:
        self._app = app
        self._is_ready = is_ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root = str(scope.get("root_path", ""))
        raw_path = scope.get("raw_path", b"").partition(b"?")[0]
        if not has_valid_escapes(raw_path):
            message = "The path has a percent-encoding that is malformed, is not UTF-8, or is of the character 0"
            await error_response(BAD_REQUEST, message)(scope, receive, send)
            return
        path = normalize_path(raw_path, str(scope["path"]))
        if (own := path.removeprefix(root)) not in WHILE_STARTING and not self._is_ready():
            await starting_response(own)(scope, receive, send)
            return
        # A plugin's definition or the import of its module may raise SystemExit, which has no error handler.
        with connector_errors("a plugin"):
            await self._app({**scope, "path": path}, receive, send)


def has_valid_escapes(raw_path: bytes) -> bool:
    """Return whether all percent-encodings in a request's path are valid.

    >>> [has_valid_escapes(path) for path in (b"/a%2Fb", b"/%E2%82%AC", b"/100%", b"/%ZZ", b"/%FF", b"/a%00b")]
    [True, True, False, False, False, False]
    """
    try:
        unquote_to_bytes(raw_path).decode()
    except UnicodeDecodeError:
        return False
    return not _WRONG_ESCAPE.search(raw_path)


def normalize_path(raw_path: bytes, path: str) -> str:
    """Return a request's path without trailing slashes, with SLASH in place of each %2F.

    >>> normalize_path(b"/connectors/", "/connectors/")
    '/connectors'
    >>> normalize_path(b"/connectors/a%2Fb/status", "/connectors/a/b/status") == f"/connectors/a{SLASH}b/status"
    True
    """
    if b"%2f" in raw_path.lower():
        segments = raw_path.decode("latin-1").split("/")
        path = "/".join(unquote(segment).replace("/", SLASH) for segment in segments)
    return path.rstrip("/") or "/"
