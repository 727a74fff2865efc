"""The style that is worth checking, as tests.

A rule is a function from a file to the violations it finds there, and its test does two things: it shows the rule a
made-up file that breaks it and one that keeps it (a check that cannot fail is no check), then it holds the whole
checkout to it. Where a rule has exceptions they are listed here, each with its reason.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("shared", "services", "api", "penstock")
FILE_LINES_MAX = 400  # a longer file is two things
FUNCTION_LINES_MAX = 60  # as much as one screen shows

# The modules of shared that may await, read a clock, or touch network, disk or another process. All others are values
# in, values out. A name ending in a slash is a package.
EDGES = {
    "shared/common/clock.py": "reads the clock, for everyone",
    "shared/common/daemon.py": "drives a service and takes the process's signals",
    "shared/common/file_lock.py": "locks a file",
    "shared/common/ivy.py": "fetches jars into the user's cache",
    "shared/common/java.py": "asks each Java for its version",
    "shared/common/keeper.py": "the process that another one does not outlive",
    "shared/common/lake.py": "reads Delta tables",
    "shared/common/lake_append.py": "appends to Delta tables",
    "shared/common/lake_files.py": "lists and removes the files of Delta tables",
    "shared/common/lake_place.py": "asks the disk what a folder is by its absolute path",
    "shared/common/settings.py": "reads the environment and the settings file",
    "shared/clients/connection/": "the sockets: the one importer of aiokafka",
    "shared/clients/admin/admin.py": "the public admin client: what it offers is awaited",
    "shared/clients/admin/groups.py": "sends requests about groups",
    "shared/clients/admin/topics.py": "sends requests about topics",
    "shared/clients/producer/batch.py": "owns the future that tells who waits for the batch",
    "shared/clients/producer/buffer_memory.py": "lets a sender wait for memory",
    "shared/clients/producer/coordinator.py": "sends requests about transactions",
    "shared/clients/producer/delivery.py": "what a caller awaits",
    "shared/clients/producer/held_up_share.py": "lets a sender wait for its partition",
    "shared/clients/producer/intake.py": "lets a send wait for metadata and memory",
    "shared/clients/producer/producer.py": "the public producer: what it offers is awaited",
    "shared/clients/producer/sender.py": "sends batches",
    "shared/clients/producer/transactional.py": "the public transactions: what it offers is awaited",
    "shared/clients/consumer/committer.py": "sends commits",
    "shared/clients/consumer/committing.py": "the public consumer's commits: what they offer is awaited",
    "shared/clients/consumer/consumer.py": "the public consumer: what it offers is awaited",
    "shared/clients/consumer/fetching.py": "opens and closes the consumer's connection",
    "shared/clients/consumer/reader.py": "sends fetches and lookups",
    "shared/clients/consumer/membership.py": "waits for the group and calls the user's listener",
    "shared/clients/consumer/group_coordinator.py": "takes a consumer's steps in its group",
    "shared/clients/group/requests.py": "sends the group's requests and heartbeats",
    "shared/clients/consumer/subscribing.py": "opens the connection and takes the place in the group",
    "shared/clients/consumer/offsets.py": "asks for offsets",
    "shared/clients/dead_letter_log.py": "reads a dead-letter topic and sends it back",
    "shared/connect/config_provider.py": "reads the files and variables that configurations name",
    "shared/connect/connector.py": "the public connector API: what it offers is awaited",
    "shared/connect/connectors/": "reads and writes other systems",
    "shared/connect/conversion.py": "awaits what conversions wait for",
    "shared/connect/converters/registry.py": "has what a converter lacks fetched",
    "shared/connect/converters/registry_client.py": "asks a schema registry",
    "shared/connect/error_reporting.py": "sends dead letters",
    "shared/connect/exactly_once_source_task.py": "drives a source task in transactions",
    "shared/connect/group/worker_coordinator.py": "takes a worker's steps in its group",
    "shared/connect/herder/base_herder.py": "asks Kafka and plugins for what REST shows",
    "shared/connect/herder/distributed.py": "a distributed worker's loop",
    "shared/connect/herder/distributed_requests.py": "what is asked of a distributed worker is awaited",
    "shared/connect/herder/fencing.py": "takes transactional ids over",
    "shared/connect/herder/leader_client.py": "sends requests to the leader",
    "shared/connect/herder/standalone.py": "a standalone worker's loop",
    "shared/connect/herder/work_runner.py": "starts and stops connectors and tasks",
    "shared/connect/herder/command_queue.py": "lets who asks wait for the herder",
    "shared/connect/herder/connector_offsets.py": "asks Kafka and the store for offsets",
    "shared/connect/isolation/child.py": "a process of its own from within",
    "shared/connect/isolation/connector_child.py": "does what a connector is asked in its own process",
    "shared/connect/isolation/own_thread.py": "runs code that may block on a thread of its own",
    "shared/connect/isolation/process.py": "starts, hears and ends a process",
    "shared/connect/isolation/process_connector.py": "asks a connector in its process",
    "shared/connect/isolation/process_task.py": "hears and steers a task in its process",
    "shared/connect/isolation/questions.py": "lets who asks wait for the other side",
    "shared/connect/isolation/remote_offsets.py": "asks the worker for offsets",
    "shared/connect/isolation/task_child.py": "drives a task in its own process",
    "shared/connect/retry_waits.py": "waits between retries and for what converters fetch, until a task stops",
    "shared/connect/source_offsets.py": "asks the offset store",
    "shared/connect/source_shell.py": "drives a source task",
    "shared/connect/storage/config_store.py": "writes and reads the config topic",
    "shared/connect/storage/kafka_based_log.py": "makes, follows and writes a topic",
    "shared/connect/storage/offset_store.py": "writes and reads the offset topic or file",
    "shared/connect/storage/status_store.py": "writes and reads the status topic",
    "shared/connect/task.py": "the public task API: what it offers is awaited",
    "shared/connect/worker.py": "runs connectors and tasks",
    "shared/connect/worker_connector.py": "awaits a connector's code",
    "shared/connect/worker_sink_task.py": "drives a sink task",
    "shared/connect/worker_source_task.py": "drives a source task",
    "shared/connect/worker_task.py": "awaits a task's code",
    "shared/streams/changelog.py": "writes and reads the changelog topic",
    "shared/streams/instance_registry.py": "writes and reads the topic of instances",
    "shared/streams/global_tables.py": "reads the topics of global tables",
    "shared/streams/repartition_purge.py": "deletes records that were read",
    "shared/streams/owned_task.py": "holds a task's connections and closes them",
    "shared/streams/restoring.py": "reads snapshots and the changelog topic",
    "shared/streams/standbys.py": "follows the changelogs of other instances' tasks",
    "shared/streams/source_positions.py": "asks what the source partitions hold",
    "shared/streams/state/rocksdb.py": "reads and writes rows on disk",
    "shared/streams/state/state_directory.py": "makes the state's folder and locks it",
    "shared/streams/task_commits.py": "writes the commits of all tasks",
    "shared/streams/stream_worker.py": "drives the tasks of one instance",
    "shared/streams/topics.py": "makes the topics of a topology",
    "shared/testing/oracle.py": "makes a folder for cases whose state is on disk",
    "shared/testing/fake_broker/cluster.py": "the fake cluster as a test uses it",
    "shared/testing/fake_broker/server.py": "the sockets of the fake broker's nodes",
}
IMPURE_IMPORTS = {
    *("asyncio", "anyio", "threading", "concurrent", "multiprocessing", "subprocess", "signal"),
    *(
        "time",
        "socket",
        "ssl",
        "selectors",
        "httpx",
        "urllib",
        "tempfile",
        "shutil",
        "aiokafka",
        "deltalake",
        "rocksdict",
    ),
}
IMPURE_CALLS = {
    *("now", "utcnow", "today"),
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "unlink", "mkdir", "rmdir", "rename", "touch"),
}

# Tests that are about the checkout and not about one module.
NO_MODULE = {
    "tests/test_tidy.py": "the rules of style",
    "tests/test_compose.py": "compose.yaml",
    "tests/test_readme.py": "README.md",
    "tests/shared/clients/producer/test_coverage_map.py": "COVERAGE.md beside it",
    "tests/shared/streams/test_coverage_map.py": "COVERAGE.md beside it",
    "tests/shared/connect/test_coverage_map.py": "COVERAGE.md beside it",
    "tests/shared/clients/consumer/test_coverage_map.py": "COVERAGE.md beside it",
    "tests/shared/connect/herder/test_coverage_map.py": "COVERAGE.md beside it",
    "tests/test_packaging.py": "the wheel",
    "tests/test_ci_run.py": ".ci/run",
    "tests/test_scripts_install.py": "scripts/install",
    "tests/test_scripts_test.py": "scripts/test",
    "tests/shared/clients/connection/test_aiokafka_contract.py": "what we use of aiokafka, which is not ours",
}

REAL_BROKER = (
    "tests/integration/",
    "tests/contract/",
)  # tests against a real broker: of no one module, and they may poll

THIRD_PARTY = ("LICENSE", "tests/data/")  # not ours to word


@dataclass(frozen=True)
class Source:
    """One text file: its path from the checkout's root, with forward slashes, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @property
    def is_room(self) -> bool:
        return self.is_python and self.path.split("/")[0] in ROOMS

    @property
    def is_test(self) -> bool:
        return self.is_python and self.path.startswith("tests/")


Rule = Callable[[Source], Iterator[str]]


@lru_cache(maxsize=1)
def checkout() -> tuple[Source, ...]:
    """Every text file that is tracked or would be, without the third parties' own."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode == 0:
        names = set(answer.stdout.split("\0")) - {""}
    else:  # an unpacked archive has no git
        paths = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        names = {
            path.as_posix() for path in paths if not path.parts[0].startswith(".") and "__pycache__" not in path.parts
        }
    found = []
    for name in sorted(names):
        path = ROOT / name
        if name.startswith(THIRD_PARTY) or not path.is_file():
            continue
        try:
            found.append(Source(name, path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return tuple(found)


def hold(rule: Rule, *, broken: Source, kept: Source) -> None:
    """The rule finds the broken file, passes the kept one, and passes the checkout."""
    assert list(rule(broken)), "the rule does not see what it is there for"
    assert not list(rule(kept)), "the rule sees what is not there"
    violations = [f"{source.path}: {said}" for source in checkout() for said in rule(source)]
    assert not violations, "\n" + "\n".join(violations)


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def file_is_short(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if source.is_room and lines > FILE_LINES_MAX:
        yield f"{lines} lines, {FILE_LINES_MAX} at most"


def function_is_short(source: Source) -> Iterator[str]:
    for function in functions(source.tree) if source.is_room else ():
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            yield f"{function.lineno}: {function.name} has {lines} lines, {FUNCTION_LINES_MAX} at most"


def module_has_docstring(source: Source) -> Iterator[str]:
    if source.is_python and source.text.strip() and not ast.get_docstring(source.tree):
        yield "no docstring: say what the module holds and why"


def nothing_is_mocked(source: Source) -> Iterator[str]:
    for line, name in imported_names(source.tree) if source.is_python else ():
        if name == "mock" or name.startswith(("unittest.mock", "mock.", "pytest_mock")):
            yield f"{line}: imports {name}"
    if source.is_python:
        for function in functions(source.tree):
            if any(argument.arg == "mocker" for argument in function.args.args):
                yield f"{function.lineno}: {function.name} takes the fixture mocker"


def nothing_is_left_over(source: Source) -> Iterator[str]:
    words = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")) + r")\b")
    for number, line in enumerate(source.text.splitlines(), start=1):
        if match := words.search(line):
            yield f"{number}: {match[0]}"


def a_test_never_sleeps(source: Source) -> Iterator[str]:
    if not source.is_test or source.path.startswith(REAL_BROKER):
        return
    for line, name in imported_names(source.tree):
        if name in ("time.sleep", "asyncio.sleep", "anyio.sleep"):
            yield f"{line}: imports {name}"
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in (
            "time.sleep",
            "asyncio.sleep",
            "anyio.sleep",
        ):
            continue
        if [ast.unparse(argument) for argument in node.args] != ["0"]:  # sleep(0) lets others run and waits for nothing
            yield f"{node.lineno}: {ast.unparse(node)}"


def a_test_has_docstring(source: Source) -> Iterator[str]:
    if source.is_test and PurePosixPath(source.path).name.startswith("test_"):
        for function in functions(source.tree):
            if function.name.startswith("test_") and not ast.get_docstring(function):
                yield f"{function.lineno}: {function.name} does not say the truth it guards"


def a_test_mirrors_module(source: Source) -> Iterator[str]:
    path = PurePosixPath(source.path)
    if (
        not source.is_test
        or not path.name.startswith("test_")
        or source.path.startswith(REAL_BROKER)
        or source.path in NO_MODULE
    ):
        return
    folder, name = PurePosixPath(*path.parts[1:-1]), path.stem.removeprefix("test_")
    # A module with much to test has files of its own for each theme: test_<module>_<theme>.py.
    names = [name[:at] for at in range(1, len(name) + 1) if at == len(name) or name[at] == "_"]
    if not any((ROOT / folder / f"{n}.py").is_file() or (ROOT / folder / n / "__init__.py").is_file() for n in names):
        yield f"there is no {folder / name}.py"


def is_edge_of(edge: str, path: str) -> bool:
    return path == edge or (edge.endswith("/") and path.startswith(edge))


def is_edge(path: str) -> bool:
    return any(is_edge_of(edge, path) for edge in EDGES)


def is_declaration(function: ast.AsyncFunctionDef) -> bool:
    """A method of an interface: it names what the caller will await and runs nothing itself."""
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in function.body)


def core_is_sans_io(source: Source) -> Iterator[str]:
    if source.is_room and source.path.startswith("shared/") and not is_edge(source.path):
        yield from impurities(source)


def impurities(source: Source) -> Iterator[str]:
    for line, name in imported_names(source.tree):
        if name.split(".")[0] in IMPURE_IMPORTS:
            yield f"{line}: imports {name}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.AsyncFunctionDef) and not is_declaration(node):
            yield f"{node.lineno}: async def {node.name}"
        elif isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) or (
            isinstance(node, ast.comprehension) and node.is_async
        ):
            yield f"{getattr(node, 'lineno', '?')}: awaits"
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in IMPURE_CALLS:
                yield f"{node.lineno}: calls {ast.unparse(node.func)}"


def names_no_machine_path(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if match := re.search(r"(?<![\w.}~)])/(" + "ro" + "ot|wo" + "rk|tm" + r"p)(?![\w-])", line):
            yield f"{number}: {match[0]} is a path of one machine"


def names_no_registry(source: Source) -> Iterator[str]:
    hosts = (r"pypi\.org", r"pythonhosted\.org", r"maven\.org", r"maven\.apache\.org", r"npmjs\.\w+")
    products = ("jf" + "rog", "arti" + "factory", "nex" + "us")
    wanted = re.compile(rf"\b({'|'.join(hosts + products)})\b|--(extra-)?index" + "-url")
    for number, line in enumerate(source.text.splitlines(), start=1):
        if match := wanted.search(line):
            yield f"{number}: {match[0]}: which registry is used is the machine's own setting"


def python(path: str, *lines: str) -> Source:
    return Source(path, "\n".join(('"""A made-up module."""', *lines)))


def test_files_are_short() -> None:
    """A module of the rooms has at most FILE_LINES_MAX lines."""
    hold(file_is_short, broken=python("api/a.py", *["x = 1"] * 400), kept=python("api/a.py", *["x = 1"] * 399))


def test_functions_are_short() -> None:
    """A function of the rooms has at most FUNCTION_LINES_MAX lines."""
    body = ["    x = 1"] * FUNCTION_LINES_MAX
    hold(
        function_is_short, broken=python("api/a.py", "def f():", *body), kept=python("api/a.py", "def f():", *body[1:])
    )


def test_modules_have_docstrings() -> None:
    """Every module that holds anything opens with what it is about."""
    hold(module_has_docstring, broken=Source("api/a.py", "x = 1"), kept=Source("api/__init__.py", ""))


def test_nothing_is_mocked() -> None:
    """Tests use real parts or fakes that are verified, never mocks."""
    broken = python("tests/a.py", "from unittest " + "import mock")
    hold(nothing_is_mocked, broken=broken, kept=python("tests/a.py", "import unittest"))
    assert list(nothing_is_mocked(python("tests/a.py", "def test_a(mocker): ...")))


def test_nothing_is_left_over() -> None:
    """No file carries a note of unfinished work."""
    hold(nothing_is_left_over, broken=python("api/a.py", "# TO" + "DO: later"), kept=python("api/a.py", "todos = []"))
    assert list(nothing_is_left_over(python("api/a.py", "raise NotImplemented" + "Error")))


def test_tests_never_sleep() -> None:
    """A unit test waits for no clock; tests against a real broker may poll."""
    broken = python("tests/a.py", "import asyncio", "await_it = asyncio.sleep(0.1)")
    hold(a_test_never_sleeps, broken=broken, kept=python("tests/integration/a.py", "time.sleep(1)"))
    assert list(a_test_never_sleeps(python("tests/a.py", "from time import sleep")))
    assert not list(a_test_never_sleeps(python("tests/a.py", "asyncio.sleep(0)")))


def test_tests_have_docstrings() -> None:
    """Every test says the truth it guards."""
    kept = python("tests/test_a.py", "def test_b():", "    'B holds.'", "def helper(): ...")
    hold(a_test_has_docstring, broken=python("tests/test_a.py", "class TestA:", "    def test_b(self): ..."), kept=kept)


def test_tests_mirror_modules() -> None:
    """A unit test lies where its module lies, so that either is found from the other."""
    broken, kept = python("tests/shared/common/test_nowhere.py"), python("tests/shared/common/test_errors.py")
    hold(a_test_mirrors_module, broken=broken, kept=kept)
    assert all((ROOT / name).is_file() for name in NO_MODULE), "an exception is out of date"


def test_core_is_sans_io() -> None:
    """Only the listed edges of shared await, read a clock, or touch network, disk or another process."""
    kept = python("shared/a.py", "class P:", "    async def on_it(self) -> None:", "        'Said.'", "        ...")
    for line in (
        "import asyncio",
        "from time import time",
        "async def f(): return 1",
        "x = datetime.now()",
        "f = open('f')",
    ):
        hold(core_is_sans_io, broken=python("shared/a.py", line), kept=kept)
    assert list(core_is_sans_io(python("shared/a.py", "async def f():", "    return [x async for x in y]")))


def test_edges_are_edges() -> None:
    """The list of edges names what is there and needs to be in it, so that no core module is an edge unseen."""
    missing = [edge for edge in EDGES if not (ROOT / edge).exists()]
    assert not missing, missing
    edges = {edge: [source for source in checkout() if is_edge_of(edge, source.path)] for edge in EDGES}
    pure = [edge for edge, sources in edges.items() if not any(any(impurities(source)) for source in sources)]
    assert not pure, pure
    assert not any(impurities(python("shared/a.py", "x = 1")))


def test_no_machine_paths() -> None:
    """No file names a folder of the machine it was written on."""
    broken = Source("README.md", "cd /wo" + "rk/penstock")
    hold(names_no_machine_path, broken=broken, kept=Source("README.md", "GET /workers, http://host/tmpl, ./work"))
    assert list(names_no_machine_path(Source("a", "x = '/tm" + "p/x'")))


def test_no_registry_hosts() -> None:
    """No file says which registry packages come from; that is set on each machine."""
    kept = Source("requirements.lock", "httpx==1 --hash=sha256:00")
    hold(names_no_registry, broken=Source("requirements.lock", "--index" + "-url https://mirror"), kept=kept)
    assert list(names_no_registry(Source("a", "https://py" + "pi.org/simple")))
