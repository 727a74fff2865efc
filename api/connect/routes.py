"""Kafka Connect's REST API over a herder: the app and all its routes.

Statuses and bodies are Kafka Connect's, so its clients work unchanged. Every error, except those of `/health`, is
`{"error_code", "message"}`. A trailing slash is ignored. A body is JSON, also without a content type. Any other content
type is rejected with 415. A malformed body is rejected with 400; Kafka Connect answers 500.

A request that only another worker can answer is forwarded to it (`penstock.api.connect.forwarding`).
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.connect.errors import install_error_handlers, starting_response
from penstock.api.connect.openapi_types import (
    CONFIG_BODY,
    CREATE_BODY,
    EXPAND_QUERY,
    LEVEL_BODY,
    LEVEL_QUERY,
    OFFSETS_BODY,
    PATCH_BODY,
    PLUGINS_QUERY,
    RESTART_QUERY,
    ActiveTopics,
    Config,
    ConfigDefinition,
    ConnectorInfo,
    ConnectorOffsets,
    Connectors,
    ConnectorStatus,
    ConnectorTaskState,
    LoggerLevel,
    LoggerLevels,
    LoggerName,
    Message,
    Plugin,
    ServerInfo,
    TaskInfo,
    Validation,
    WorkerHealth,
)
from penstock.api.connect.request_parsing import (
    ConnectPaths,
    Name,
    TaskNumber,
    flag,
    json_body,
    json_list,
    patch_of,
    settings_body,
)
from penstock.api.http.json_response import json_response
from penstock.api.http.openapi import serve_openapi_document
from penstock.api.http.problem import RestError
from penstock.api.http.status_codes import ACCEPTED, CREATED, INTERNAL_SERVER_ERROR, NO_CONTENT
from penstock.shared.common import metrics
from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.errors import BadRequest, ConnectorNotFound
from penstock.shared.connect.herder.connector_offsets import rows_of
from penstock.shared.connect.herder.distributed import DistributedHerder
from penstock.shared.connect.herder.loggers import level_number
from penstock.shared.connect.herder.standalone import StandaloneHerder
from penstock.shared.connect.properties import properties_from_json
from penstock.shared.connect.runtime.create_request import INITIAL_STATES, config_of, create_request
from penstock.shared.connect.runtime.states import ConnectorTaskId, TargetState
from penstock.shared.connect.storage.config_records import RestartRequest

Herder = DistributedHerder | StandaloneHerder


def create_connect_app(herder: Herder, registry: CollectorRegistry | None = None) -> FastAPI:
    """Return the app: Kafka Connect's REST API over one herder, and `/metrics` of `registry`."""
    app = FastAPI(title="Penstock Connect", docs_url=None, redoc_url=None, redirect_slashes=False)
    install_error_handlers(app)
    app.add_middleware(ConnectPaths, is_ready=lambda: herder.is_ready)
    app.include_router(_root_routes(herder))
    app.include_router(_connector_routes(herder))
    app.include_router(_state_routes(herder))
    app.include_router(_offset_routes(herder))
    app.include_router(_task_routes(herder))
    app.include_router(_plugin_routes(herder))
    app.include_router(_admin_routes(herder))
    if registry is not None:

        @app.get("/metrics", include_in_schema=False)
        async def render_metrics() -> Response:
            return Response(metrics.render(registry), media_type=metrics.CONTENT_TYPE)

    serve_openapi_document(app)
    return app


class StartingApp:
    """Answers 503 until `app` is set. From then on `app` answers (see `ConnectPaths`).

    The worker thus listens before its herder starts, and reports an address in use at once.
    """

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await starting_response(scope["path"])(scope, receive, send)


def _root_routes(herder: Herder) -> APIRouter:
    router = APIRouter(tags=["server"])

    @router.get(
        "/",
        summary="The runtime's version and the cluster's id",
        responses={200: {"model": ServerInfo}, "default": {"model": RestError, "description": "failed"}},
    )
    async def get_server_info() -> Response:
        return json_response(await herder.server_info())

    @router.get(
        "/health",
        summary="Whether the worker has started and answers",
        responses={200: {"model": WorkerHealth}, "default": {"model": WorkerHealth, "description": "not healthy"}},
    )
    async def get_worker_health() -> Response:
        if not await herder.is_healthy():
            message = "Worker was unable to handle this request and may be unable to handle other requests."
            return json_response({"status": "unhealthy", "message": message}, INTERNAL_SERVER_ERROR)
        message = "Worker has completed startup and is ready to handle requests."
        return json_response({"status": "healthy", "message": message})

    return router


def _connector_routes(herder: Herder) -> APIRouter:
    router = APIRouter(prefix="/connectors", tags=["connectors"])

    @router.get(
        "",
        summary="All connectors; with `expand=info` and `expand=status` also their details",
        responses={200: {"model": Connectors}},
        openapi_extra=EXPAND_QUERY,
    )
    async def list_connectors(request: Request) -> Response:
        expand = request.query_params.getlist("expand")
        return json_response(_expanded_connectors(herder, expand) if expand else herder.connectors())

    @router.post(
        "",
        summary="Create a connector",
        responses={201: {"model": ConnectorInfo}},
        openapi_extra=CREATE_BODY,
        status_code=CREATED,
    )
    async def create_connector(request: Request) -> Response:
        name, config, initial_state = create_request(await settings_body(request))
        target = INITIAL_STATES[initial_state] if initial_state else None
        _, info = await herder.put_connector(name, config, target, replace=False)
        return _created_response(request, info)

    @router.get("/{name}", summary="A connector's config and tasks", responses={200: {"model": ConnectorInfo}})
    async def get_connector(name: Name) -> Response:
        return json_response(herder.connector_info(name))

    @router.delete("/{name}", summary="Delete a connector", status_code=NO_CONTENT)
    async def delete_connector(name: Name) -> Response:
        await herder.delete_connector(name)
        return Response(status_code=NO_CONTENT)

    @router.get("/{name}/config", summary="A connector's config", responses={200: {"model": Config}})
    async def get_connector_config(name: Name) -> Response:
        return json_response(herder.shown_config(name))

    @router.put(
        "/{name}/config",
        summary="Create a connector, or replace its config",
        responses={200: {"model": ConnectorInfo}, 201: {"model": ConnectorInfo, "description": "created"}},
        openapi_extra=CONFIG_BODY,
    )
    async def put_config(name: Name, request: Request) -> Response:
        created, info = await herder.put_connector(name, config_of(await settings_body(request), name), replace=True)
        return _created_response(request, info) if created else json_response(info)

    @router.patch(
        "/{name}/config",
        summary="Change some settings; null removes a setting",
        responses={200: {"model": ConnectorInfo}},
        openapi_extra=PATCH_BODY,
    )
    async def patch_config(name: Name, request: Request) -> Response:
        return json_response(await herder.patch_connector(name, patch_of(await settings_body(request), name)))

    @router.get(
        "/{name}/topics", summary="The topics that a connector has used", responses={200: {"model": ActiveTopics}}
    )
    async def get_connector_topics(name: Name) -> Response:
        return json_response(herder.active_topics(name))

    @router.put(
        "/{name}/topics/reset",
        summary="Reset the topics that a connector has used",
        status_code=ACCEPTED,
        response_class=Response,
    )
    async def reset_topics(name: Name) -> Response:
        herder.reset_active_topics(name)
        return Response(status_code=ACCEPTED)

    return router


def _expanded_connectors(herder: Herder, expand: list[str]) -> dict[str, Any]:
    details = {"info": herder.connector_info, "status": herder.connector_status}
    connectors: dict[str, Any] = {}
    for name in herder.connectors():
        try:
            connectors[name] = {part: details[part](name) for part in expand if part in details}
        except ConnectorNotFound:
            # The connector was deleted meanwhile, or its status is not known yet.
            continue
    return connectors


def _created_response(request: Request, info: dict[str, Any]) -> Response:
    location = f"{str(request.base_url).rstrip('/')}/connectors/{quote(info['name'], safe='')}"
    return json_response(info, CREATED, {"Location": location})


def _state_routes(herder: Herder) -> APIRouter:
    router = APIRouter(prefix="/connectors", tags=["state"])

    @router.get(
        "/{name}/status",
        summary="The states of a connector and its tasks",
        responses={200: {"model": ConnectorStatus}},
    )
    async def get_connector_status(name: Name) -> Response:
        return json_response(herder.connector_status(name))

    for action, target, status_code in (
        ("pause", TargetState.PAUSED, ACCEPTED),
        ("resume", TargetState.STARTED, ACCEPTED),
        ("stop", TargetState.STOPPED, NO_CONTENT),
    ):
        _target_route(router, herder, action, target, status_code)

    @router.post(
        "/{name}/restart",
        summary="Restart a connector, and with includeTasks its tasks",
        status_code=ACCEPTED,
        responses={202: {"model": ConnectorStatus}, 204: {"description": "the connector alone was restarted"}},
        openapi_extra=RESTART_QUERY,
    )
    async def restart_connector(name: Name, request: Request) -> Response:
        only_failed = flag(request, "onlyFailed")
        include_tasks = flag(request, "includeTasks")
        if not only_failed and not include_tasks:
            await herder.restart_connector(name)
            return Response(status_code=NO_CONTENT)
        return json_response(await herder.restart(RestartRequest(name, only_failed, include_tasks)), ACCEPTED)

    return router


def _target_route(router: APIRouter, herder: Herder, action: str, target: TargetState, status_code: int) -> None:
    @router.put(
        f"/{{name}}/{action}",
        summary=f"{action.capitalize()} a connector",
        status_code=status_code,
        name=action,
        response_class=Response,
    )
    async def change_target_state(name: Name) -> Response:
        await herder.set_target_state(name, target)
        return Response(status_code=status_code)


def _offset_routes(herder: Herder) -> APIRouter:
    router = APIRouter(prefix="/connectors", tags=["offsets"])

    @router.get("/{name}/offsets", summary="The offsets of a connector", responses={200: {"model": ConnectorOffsets}})
    async def get_connector_offsets(name: Name) -> Response:
        return json_response(await herder.connector_offsets(name))

    @router.patch(
        "/{name}/offsets",
        summary="Set the offsets of a stopped connector; null deletes an offset",
        responses={200: {"model": Message}},
        openapi_extra=OFFSETS_BODY,
    )
    async def alter_connector_offsets(name: Name, request: Request) -> Response:
        rows = rows_of(await json_body(request))
        return json_response(await herder.alter_offsets(name, rows))

    @router.delete(
        "/{name}/offsets", summary="Delete the offsets of a stopped connector", responses={200: {"model": Message}}
    )
    async def reset_connector_offsets(name: Name) -> Response:
        return json_response(await herder.alter_offsets(name, None))

    return router


def _task_routes(herder: Herder) -> APIRouter:
    router = APIRouter(prefix="/connectors", tags=["tasks"])

    @router.get(
        "/{name}/tasks", summary="A connector's tasks with their configs", responses={200: {"model": list[TaskInfo]}}
    )
    async def get_connector_tasks(name: Name) -> Response:
        return json_response(herder.task_infos(name))

    @router.post("/{name}/tasks", include_in_schema=False)
    async def put_tasks(name: Name, request: Request) -> Response:
        body = await request.body()
        configs = [properties_from_json(row, "task config") for row in json_list(body)]
        await herder.put_task_configs(name, configs, body, request.headers)
        return Response(status_code=NO_CONTENT)

    @router.put("/{name}/fence", include_in_schema=False)
    async def fence_older_tasks(name: Name, request: Request) -> Response:
        await herder.fence(name, await request.body(), request.headers)
        return Response(status_code=NO_CONTENT)

    @router.get(
        "/{name}/tasks/{task}/status", summary="The state of a task", responses={200: {"model": ConnectorTaskState}}
    )
    async def task_status(name: Name, task: TaskNumber) -> Response:
        return json_response(herder.task_status(ConnectorTaskId(name, task)))

    @router.post("/{name}/tasks/{task}/restart", summary="Restart a task", status_code=NO_CONTENT)
    async def restart_task(name: Name, task: TaskNumber) -> Response:
        await herder.restart_task(ConnectorTaskId(name, task))
        return Response(status_code=NO_CONTENT)

    return router


def _plugin_routes(herder: Herder) -> APIRouter:
    """The routes of the installed plugins and their settings."""
    router = APIRouter(prefix="/connector-plugins", tags=["plugins"])

    @router.get(
        "",
        summary="The installed connectors; with `connectorsOnly=false` every plugin",
        responses={200: {"model": list[Plugin]}},
        openapi_extra=PLUGINS_QUERY,
    )
    async def list_plugins(request: Request) -> Response:
        return json_response(herder.plugin_list(connectors_only=flag(request, "connectorsOnly", default=True)))

    @router.get("/{name}/config", summary="A plugin's settings", responses={200: {"model": list[ConfigDefinition]}})
    async def plugin_config(name: Name) -> Response:
        return json_response(herder.plugin_config(name))

    @router.put(
        "/{name}/config/validate",
        summary="Validate a connector's config",
        responses={200: {"model": Validation}},
        openapi_extra=CONFIG_BODY,
    )
    async def validate_connector_config(name: Name, request: Request) -> Response:
        config = properties_from_json(await settings_body(request), "config")
        try:
            return json_response(await herder.validate(config, name))
        except ConfigError as e:
            # Kafka Connect answers 500 too, for example for an unknown class.
            return json_response({"error_code": INTERNAL_SERVER_ERROR, "message": str(e)}, INTERNAL_SERVER_ERROR)

    return router


def _admin_routes(herder: Herder) -> APIRouter:
    """Routes that return and set levels of this worker's loggers; `scope=cluster` sets a level in all workers."""
    router = APIRouter(prefix="/admin/loggers", tags=["admin"])

    @router.get("", summary="Loggers whose level is set", responses={200: {"model": LoggerLevels}})
    async def get_log_levels() -> Response:
        return json_response(herder.loggers.levels())

    @router.get("/{name}", summary="The level of a logger", responses={200: {"model": LoggerLevel}})
    async def get_log_level(name: Name) -> Response:
        return json_response(herder.loggers.level(name))

    @router.put(
        "/{name}",
        summary="Set the level of a logger and its descendants",
        responses={200: {"model": list[LoggerName]}, 204: {"description": "set in the cluster"}},
        openapi_extra=LEVEL_BODY | LEVEL_QUERY,
    )
    async def set_level(name: Name, request: Request) -> Response:
        body = await json_body(request)
        level = body.get("level") if isinstance(body, dict) else None
        if not isinstance(level, str):
            raise BadRequest("Desired 'level' parameter was not specified in request.")
        try:
            level_number(level)
        except ConfigError as e:
            # Kafka Connect answers 404 for an unknown level.
            raise ConnectorNotFound(str(e)) from None
        scope = request.query_params.get("scope", "worker").lower()
        if scope == "cluster":
            await herder.set_cluster_level(name, level)
            return Response(status_code=NO_CONTENT)
        return json_response(herder.loggers.set_level(name, level))

    return router
