"""Penstock's services as children of one process: started, watched, killed and restarted.

Every child listens on a port of this machine, gets the settings of its spec through its environment, and ends with its
parent. The settings include the child's shutdown timeout. `stop` waits longer than that timeout before it kills the
child.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from penstock.api.http.server import url_of
from penstock.services.local import ports
from penstock.shared.common.child_process import ChildDied, ChildProcess
from penstock.shared.common.errors import FatalError
from penstock.shared.common.http_tls import client_tls
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.common.setting_names import ENV_PREFIX, without_settings

HOST = "127.0.0.1"
# A shutdown may take this long, unless the spec of the service sets another limit.
SHUTDOWN_TIMEOUT_MS = 30_000
# After the limit of its shutdown, a process has this much more time to end before it is killed.
KILL_GRACE_MS = 2_000
HEALTH_INTERVAL_MS = 100
HEALTH_STILL_MS = 300_000
"""A service whose `/health` stays the same for so long is stuck. On a loaded machine imports alone take a minute."""
# While a service is not healthy, the reason is reported at this interval.
HEALTH_REPORT_MS = 10_000
_DIGITS = re.compile(r"\d+")
REQUEST_TIMEOUT_MS = 5_000


class ServiceStuck(FatalError):
    """A service runs, but its `/health` has failed for the same reason for too long.

    The message has this reason and the path of the service's log file.
    """


def failing_checks(health: str) -> str:
    """Return the details of the failing checks in a `/health` response; the response itself if it has no valid checks.

    >>> failing_checks('{"checks": {"tasks": {"status": "failing", "detail": "starting"}, "kafka": {"status": "ok"}}}')
    'tasks: starting'
    """
    try:
        checks = decode_json(health)["checks"]
        return "; ".join(f"{name}: {one['detail']}" for name, one in checks.items() if one["status"] != "ok")
    except (InvalidJson, LookupError, TypeError, AttributeError):
        return health


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """How a stack runs one service: `python -m <module> <arguments>` with `settings` as PENSTOCK_ variables.

    Without arguments, `penstock.services.cli` gets the service's name.
    """

    name: str
    settings: Mapping[str, str]
    module: str = "penstock.services.cli"
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    shutdown_timeout_ms: int = SHUTDOWN_TIMEOUT_MS
    host: str = HOST

    @property
    def stop_timeout_ms(self) -> int:
        """The time after a request to stop at which a stack kills the service."""
        return self.shutdown_timeout_ms + KILL_GRACE_MS

    def command(self) -> list[str]:
        """Return the command line with which a stack starts the service."""
        return [
            sys.executable,
            "-m",
            self.module,
            *(self.arguments or ([self.name] if self.module == "penstock.services.cli" else [])),
        ]


class Service:
    """One service of a stack, as a child process. Its port stays the same when it is restarted."""

    def __init__(self, spec: ServiceSpec, port: int, log_file: Path, inherited: Mapping[str, str]) -> None:
        self.spec = spec
        self.port = port
        self.log_file = log_file
        self._inherited = inherited
        self._child: ChildProcess | None = None

    def __repr__(self) -> str:
        return f"Service({self.spec.name}, {self.url}, {self._child!r})"

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        return url_of(self.spec.host, self.port)

    async def start(self) -> None:
        """Start the child. Raises ConfigError if it cannot be started."""
        own = {
            "HTTP__HOST": self.spec.host,
            "HTTP__PORT": str(self.port),
            "LOG__FORMAT": "json",
            "SHUTDOWN_TIMEOUT_MS": str(self.spec.shutdown_timeout_ms),
            **self.spec.settings,
        }
        environment = {**self._inherited, **self.spec.environment}
        environment |= {f"{ENV_PREFIX}{name}": value for name, value in own.items()}
        self._child = await ChildProcess.start(
            self.spec.command(),
            log_file=self.log_file,
            name=self.name,
            env=environment,
            orphan_limit_ms=self.spec.stop_timeout_ms,
        )

    async def healthy(
        self, report: Callable[[Service, str], None] | None = None, still_ms: int = HEALTH_STILL_MS
    ) -> None:
        """Wait until the status of `/health` is 200. Until then, `report` is called every HEALTH_REPORT_MS with the
        reason.

        Raises ChildDied with the last output if the process ends. Raises ServiceStuck if the reason, apart from its
        digits, does not change for `still_ms`.
        """
        clock = asyncio.get_running_loop().time
        reason = "no response yet"
        changed_s = clock()
        reported_s = changed_s
        async with _make_http_client() as client:
            while True:
                if self._child is None or self._child.returncode is not None:
                    raise self.died()
                before = reason
                try:
                    response = await client.get(f"{self.url}/health")
                    if response.status_code == httpx.codes.OK:
                        return
                    reason = failing_checks(response.text)
                except httpx.HTTPError as e:
                    reason = f"no response ({type(e).__name__})"
                now_s = clock()
                # Without the numbers: a duration that grows is not progress.
                if _DIGITS.sub("", reason) != _DIGITS.sub("", before):
                    changed_s = now_s
                elif (now_s - changed_s) * 1_000 >= still_ms:
                    raise ServiceStuck(
                        f"{self.name} is not healthy, for the same reason for {still_ms} ms: {reason}; its log: "
                        f"{self.log_file}"
                    )
                if report is not None and (now_s - reported_s) * 1_000 >= HEALTH_REPORT_MS:
                    reported_s = now_s
                    report(self, reason)
                await asyncio.sleep(HEALTH_INTERVAL_MS / 1000)

    async def get(self, path: str) -> Any:
        """Return the JSON of the service at a path; None if it does not answer with status 200 and JSON."""
        try:
            async with _make_http_client() as client:
                response = await client.get(f"{self.url}{path}")
            return decode_json(response.content) if response.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, InvalidJson):
            return None

    async def stop(self) -> None:
        """Stop the service with SIGTERM, or with SIGKILL if it has not ended after its `stop_timeout_ms`."""
        # Cleared first: otherwise `ended` would report this end as an unexpected one.
        child = self._child
        self._child = None
        if child is not None:
            await child.terminate(self.spec.stop_timeout_ms)

    async def kill(self) -> None:
        """Send SIGKILL at once, as in a crash."""
        child = self._child
        self._child = None
        if child is not None:
            child.kill()
            await child.wait()

    async def wait(self) -> int:
        """Wait for an unexpected end, and return the exit status."""
        assert self._child is not None, "start() comes first"
        return await self._child.wait()

    @property
    def ended(self) -> bool:
        """Whether the service has ended unexpectedly."""
        return self._child is not None and self._child.returncode is not None

    def died(self) -> ChildDied:
        """Return the error for an unexpected end."""
        return self._child.died() if self._child is not None else ChildDied(f"{self.name} is not running")


class Stack:
    """The services of one machine, in the order of their start."""

    def __init__(self, folder: Path, *, hermetic: bool) -> None:
        """`hermetic` children see neither the settings in this process's environment nor a penstock.toml."""
        self._logs = folder / "logs"
        self._inherited = without_settings(os.environ) if hermetic else dict(os.environ)
        self.services: dict[str, Service] = {}

    async def start(self, spec: ServiceSpec, port: int = 0) -> Service:
        """Start a service at a port, a free one by default. The caller waits for `healthy()`."""
        service = Service(spec, port or ports.pick(spec.host, 1)[0], self._logs / f"{spec.name}.log", self._inherited)
        self.services[spec.name] = service
        await service.start()
        return service

    def check(self) -> None:
        """Raise ChildDied if a service ended unexpectedly."""
        for service in self.services.values():
            if service.ended:
                raise service.died()

    async def stop(self) -> None:
        """Stop all concurrently: to stop, each needs Kafka, and none needs another service."""
        await asyncio.gather(*(service.stop() for service in self.services.values()))


def _make_http_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=REQUEST_TIMEOUT_MS / 1000, verify=client_tls(), trust_env=False)
