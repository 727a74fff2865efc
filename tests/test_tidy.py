"""Style rules, as tests.

A rule is a function from a file to its violations. The rule's test first applies it to a file that breaks it and to one
that keeps it, so that the check is known to work, and then to the whole checkout. Exceptions are listed here, each with
its reason.
"""

from __future__ import annotations

import ast
import gc
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent

REAL_BROKER = ("tests/integration/", "tests/contract/")  # tests against a real broker: they may poll
TOOL_COMMENT = re.compile(r"# (fmt|noqa|type):")  # addressed to ruff or mypy
NO_FOLDER = (*REAL_BROKER, "tests/typing/")  # tests of several folders of the source

SANS_IO = (
    "api/ingest/cloudevents.py",
    "api/ingest/ndjson.py",
    "api/ingest/result.py",
    "api/rest_proxy/v3_records.py",
    "services/consumer/retry_policy.py",
    "shared/clients/consumer/",
    "shared/clients/dead_letters/dead_letter.py",
    "shared/clients/dead_letters/late_record_headers.py",
    "shared/clients/group/",
    "shared/clients/parallel_consumer/",
    "shared/clients/producer/",
    "shared/clients/protocol/",
    "shared/common/backoff.py",
    "shared/connect/group/",
    "shared/connect/herder/restart_plan.py",
    "shared/connect/runtime/",
    "shared/connect/storage/",
    "shared/connect/transforms/",
    *(f"shared/streams/{folder}/" for folder in ("aggregations", "changelog", "dsl", "operators", "task", "windows")),
    *(
        f"shared/streams/{name}.py"
        for name in ("error_handlers", "processor", "punctuation", "record", "result_encoders", "topology")
    ),
    "shared/streams/runtime/standby_assignor.py",
)
"""The packages and files that decide. All but `EDGE_FILES` neither await nor read a clock nor use the file system, and
time is an argument."""
EDGE_FILES = {
    "shared/clients/consumer/commit_request_manager.py": "sends commits",
    "shared/clients/consumer/consumer.py": "the consumer: its clients and the machine's clock",
    "shared/clients/consumer/consumer_coordinator.py": "sends the requests of the group protocol",
    "shared/clients/consumer/fetch_request_manager.py": "sends fetches",
    "shared/clients/consumer/rebalance_listener.py": "awaits the user's listener, and has the machine's clock",
    "shared/clients/group/group_requests.py": "sends the requests of the group protocol",
    "shared/clients/producer/buffer_pool.py": "waits for memory",
    "shared/clients/producer/delivery.py": "waits for acknowledgements",
    "shared/clients/producer/producer.py": "the producer: its clients and the machine's clock",
    "shared/clients/producer/producer_batch.py": "waits for acknowledgements",
    "shared/clients/producer/sender.py": "sends batches",
    "shared/clients/producer/transaction_requests.py": "sends the requests of transactions",
    "shared/connect/group/worker_coordinator.py": "sends the requests of the group protocol",
    "shared/connect/runtime/abstract_source_task.py": "awaits `poll`, and sends its records",
    "shared/connect/runtime/conversion.py": "awaits the schema registry and retries",
    "shared/connect/runtime/error_handling.py": "waits before retries",
    "shared/connect/runtime/error_reporting.py": "sends dead letters",
    "shared/connect/runtime/exactly_once_source_task.py": "sends the requests of transactions",
    "shared/connect/runtime/offset_backing_store.py": "awaits the store",
    "shared/connect/runtime/task_factory.py": "gives tasks the machine's clock",
    "shared/connect/runtime/task_thread.py": "runs a thread",
    "shared/connect/runtime/worker.py": "starts and stops tasks, by the machine's clock",
    "shared/connect/runtime/worker_connector.py": "awaits the connector's methods",
    "shared/connect/runtime/worker_sink_task.py": "consumes records, and awaits the task's methods",
    "shared/connect/runtime/worker_source_task.py": "awaits acknowledgements, and stores offsets",
    "shared/connect/runtime/worker_task.py": "runs a task",
    "shared/connect/storage/config_store.py": "writes and reads the config topic",
    "shared/connect/storage/kafka_based_log.py": "writes and reads a topic",
    "shared/connect/storage/offset_store.py": "writes and reads the offset topic, or a file",
    "shared/connect/storage/status_store.py": "writes and reads the status topic",
    "shared/connect/transforms/timestamps.py": "reads the clock for the century of a year of two digits",
}
"""The files at the edge in the packages of `SANS_IO`, each with its I/O."""
EDGES = (
    "asyncio",
    "concurrent",
    "os",
    "select",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
)
"""The modules of the standard library that do I/O, wait, or read a clock."""
CLOCK = "penstock.shared.common.clock"
EDGE_NAMES = (CLOCK, f"{CLOCK}.SYSTEM_CLOCK", f"{CLOCK}.SystemClock")
"""Names that no sans-IO code imports: the clock of the machine, and the module that has it."""
EDGE_METHODS = (
    *("now", "today", "utcnow"),
    *("exists", "mkdir", "open", "read_bytes", "read_text", "unlink", "write_bytes", "write_text"),
)
"""Methods of `datetime` and `date` that read a clock, and of `Path` that use the file system. Sans-IO code calls no
method with such a name, and not the function `open`."""

PRODUCT = ("shared/", "services/", "api/")
SHARED_FILE_NAMES = frozenset(("__init__", "daemon", "errors", "main", "metrics", "record", "routes", "settings"))
"""The file names that several folders of the product may have, each with one meaning everywhere: the record that a
runtime processes."""

THIRD_PARTY = ("LICENSE", "tests/data/")  # third-party texts


@dataclass(frozen=True)
class Source:
    """A text file: its path from the checkout's root, with forward slashes, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @property
    def is_test(self) -> bool:
        return self.is_python and self.path.startswith("tests/")


Rule = Callable[[Source], Iterator[str]]


@lru_cache(maxsize=1)
def checkout() -> tuple[Source, ...]:
    """Every text file that git tracks or would add, without third-party files."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    response = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if response.returncode == 0:
        names = set(response.stdout.split("\0")) - {""}
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


def check_rule(rule: Rule, *, broken: Source, kept: Source) -> None:
    """Assert that the rule finds the broken file, and passes the kept one and the checkout."""
    assert list(rule(broken)), "the rule does not see what it is there for"
    assert not list(rule(kept)), "the rule sees what is not there"
    violations = [f"{source.path}: {violation}" for source in checkout() for violation in rule(source)]
    assert not violations, "\n" + "\n".join(violations)


def python_trees(source: Source) -> Iterator[ast.AST]:
    """Yield the syntax trees of a Python file, or of the Python blocks in a document, with the file's line numbers."""
    if source.is_python:
        yield source.tree
    elif source.path.endswith(".md"):
        for block in re.finditer(r"^```python\n(.*?)^```$", source.text, re.DOTALL | re.MULTILINE):
            lines_before = source.text.count("\n", 0, block.start(1))
            yield ast.increment_lineno(ast.parse(block[1]), lines_before)


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def module_has_docstring(source: Source) -> Iterator[str]:
    if source.is_python and source.text.strip() and not ast.get_docstring(source.tree):
        yield "no docstring: describe what the module holds and why"


def nothing_is_mocked(source: Source) -> Iterator[str]:
    for line, name in imported_names(source.tree) if source.is_python else ():
        if name == "mock" or name.startswith(("unittest.mock", "mock.", "pytest_mock")):
            yield f"{line}: imports {name}"
    if source.is_python:
        for function in functions(source.tree):
            if any(argument.arg == "mocker" for argument in function.args.args):
                yield f"{function.lineno}: {function.name} takes the fixture mocker"


def nothing_is_left_over(source: Source) -> Iterator[str]:
    markers = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "raise NotImplemented" + "Error")
    words = re.compile(r"\b(" + "|".join(markers) + r")\b")
    for number, line in enumerate(source.text.splitlines(), start=1):
        if match := words.search(line):
            yield f"{number}: {match[0]}"


def an_assignment_is_alone(source: Source) -> Iterator[str]:
    """A swap, or another step that needs the old values, may assign several names at once."""
    if source.path.startswith(("tests/", "bench/")):
        return
    for node in (node for tree in python_trees(source) for node in ast.walk(tree)):
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        if len(node.targets) > 1:
            yield f"{node.lineno}: assigns one value to several names"
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            assigned = {ast.unparse(name) for name in target.elts}
            if assigned.isdisjoint(ast.unparse(part) for part in ast.walk(node.value)):
                yield f"{node.lineno}: assigns several values in one line"


def a_comment_has_a_line(source: Source) -> Iterator[str]:
    """The parts of a literal or call may have a comment behind them, as a table has."""
    if not (source.is_python and source.path.startswith(PRODUCT)):
        return
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        elif token.type == tokenize.COMMENT and depth == 0 and not TOOL_COMMENT.match(token.string):
            row, column = token.start
            if token.line[:column].strip():
                yield f"{row}: a comment behind code"


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
        if [ast.unparse(argument) for argument in node.args] != ["0"]:  # sleep(0) only yields to the event loop
            yield f"{node.lineno}: {ast.unparse(node)}"


def a_test_has_docstring(source: Source) -> Iterator[str]:
    if source.is_test and PurePosixPath(source.path).name.startswith("test_"):
        for function in functions(source.tree):
            if function.name.startswith("test_") and not ast.get_docstring(function):
                yield f"{function.lineno}: {function.name} has no docstring"


def a_test_mirrors_folder(source: Source) -> Iterator[str]:
    path = PurePosixPath(source.path)
    if not source.is_test or not path.name.startswith("test_") or source.path.startswith(NO_FOLDER):
        return
    if not (ROOT / PurePosixPath(*path.parts[1:-1])).is_dir():
        yield f"there is no folder {PurePosixPath(*path.parts[1:-1])}"


def is_sans_io(source: Source) -> Iterator[str]:
    if source.is_python and source.path.startswith(SANS_IO) and source.path not in EDGE_FILES:
        yield from uses_of_edges(source)


def uses_of_edges(source: Source) -> Iterator[str]:
    for line, name in imported_names(source.tree):
        if name.partition(".")[0] in EDGES or name in EDGE_NAMES:
            yield f"{line}: imports {name}"
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name("open")):
                yield f"{node.lineno}: calls open"
            case ast.Call(func=ast.Attribute(attr=method)) if method in EDGE_METHODS:
                yield f"{node.lineno}: calls {ast.unparse(node.func)}"
            case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                yield f"{node.lineno}: awaits"


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


def repeated_file_names(sources: Iterable[Source]) -> Iterator[str]:
    found = defaultdict[str, list[str]](list)
    for source in sources:
        if source.is_python and source.path.startswith(PRODUCT):
            found[PurePosixPath(source.path).stem].append(source.path)
    for name, paths in found.items():
        if len(paths) > 1 and name not in SHARED_FILE_NAMES:
            yield f"{name}: {', '.join(paths)}"


@pytest.fixture(autouse=True, scope="module")
def _without_garbage_collector() -> Iterator[None]:
    """Turn the garbage collector off while the rules read the checkout's trees, which it would traverse repeatedly."""
    gc.disable()
    yield
    checkout.cache_clear()
    gc.enable()


def python(path: str, *lines: str) -> Source:
    return Source(path, "\n".join(('"""A made-up module."""', *lines)))


def test_modules_have_docstrings() -> None:
    """Every non-empty module has a docstring."""
    check_rule(module_has_docstring, broken=Source("api/a.py", "x = 1"), kept=Source("api/__init__.py", ""))


def test_nothing_is_mocked() -> None:
    """No test uses mocks."""
    broken = python("tests/a.py", "from unittest " + "import mock")
    check_rule(nothing_is_mocked, broken=broken, kept=python("tests/a.py", "import unittest"))
    assert list(nothing_is_mocked(python("tests/a.py", "def test_a(mocker): ...")))


def test_nothing_is_left_over() -> None:
    """No file contains a marker of unfinished work."""
    check_rule(
        nothing_is_left_over, broken=python("api/a.py", "# TO" + "DO: later"), kept=python("api/a.py", "todos = []")
    )
    assert list(nothing_is_left_over(python("api/a.py", "raise NotImplemented" + "Error")))


def test_assignments_are_alone() -> None:
    """Each assignment has a line of its own, except in tests and benchmarks."""
    kept = python("api/a.py", "a, b = b, a", "c, d = pair()", "low, self.high = self.high, middle")
    check_rule(an_assignment_is_alone, broken=python("api/a.py", "a = b = 0"), kept=kept)
    for path in ("api/a.py", "examples/a.py", "penstock/a.py", "scripts/a.py"):
        assert list(an_assignment_is_alone(python(path, "a, b = 0, 1")))
    document = Source("docs/a.md", "# A\n\n```python\na = 0\nb = c = 1\n```\n\n```sh\na=b=0\n```\n")
    assert [violation.partition(":")[0] for violation in an_assignment_is_alone(document)] == ["5"]


def test_comments_have_a_line() -> None:
    """A comment is on a line of its own."""
    check_rule(
        a_comment_has_a_line,
        broken=python("shared/a.py", "a = 1  # one"),
        kept=python("shared/a.py", "# One.", "a = 1", "b: Any = 2  # noqa: F841", "c = [", "    1,  # one", "]"),
    )


def test_tests_never_sleep() -> None:
    """Unit tests do not sleep; tests against a real broker may poll."""
    broken = python("tests/a.py", "import asyncio", "await_it = asyncio.sleep(0.1)")
    check_rule(a_test_never_sleeps, broken=broken, kept=python("tests/integration/a.py", "time.sleep(1)"))
    assert list(a_test_never_sleeps(python("tests/a.py", "from time import sleep")))
    assert not list(a_test_never_sleeps(python("tests/a.py", "asyncio.sleep(0)")))


def test_tests_have_docstrings() -> None:
    """Every test has a docstring."""
    kept = python("tests/test_a.py", "def test_b():", "    'B holds.'", "def helper(): ...")
    check_rule(
        a_test_has_docstring, broken=python("tests/test_a.py", "class TestA:", "    def test_b(self): ..."), kept=kept
    )


def test_tests_mirror_folders() -> None:
    """Every unit test is in the folder that corresponds to its subject's folder."""
    broken, kept = python("tests/shared/nowhere/test_a.py"), python("tests/shared/common/test_a.py")
    check_rule(a_test_mirrors_folder, broken=broken, kept=kept)


def test_file_names_have_one_meaning() -> None:
    """Two modules of the product have the same file name only if the name is in `SHARED_FILE_NAMES`."""
    handlers = python("services/consumer/handlers.py"), python("shared/testing/fake_broker/handlers.py")
    assert list(repeated_file_names(handlers))
    assert not list(repeated_file_names((python("shared/a/settings.py"), python("api/settings.py"))))
    assert not list(repeated_file_names((python("shared/a/one.py"), python("tests/shared/a/one.py"))))
    assert not list(repeated_file_names(checkout()))


def test_deciding_code_is_sans_io() -> None:
    """What decides neither awaits, nor reads a clock, nor uses the file system, apart from the named files."""
    path = "shared/streams/task/a.py"
    check_rule(
        is_sans_io, broken=python(path, "import time"), kept=python("shared/streams/runtime/a.py", "import time")
    )
    assert list(is_sans_io(python("shared/connect/runtime/new_policy.py", "import time")))
    for module in ("os", "shutil", "tempfile"):
        assert list(is_sans_io(python(path, f"import {module}")))
    assert list(is_sans_io(python(path, "async def run(): ...")))
    assert list(is_sans_io(python(path, "from asyncio import sleep")))
    assert list(is_sans_io(python(path, "from penstock.shared.common.clock import SYSTEM_CLOCK")))
    assert list(is_sans_io(python(path, "from penstock.shared.common.clock import SystemClock")))
    assert list(is_sans_io(python(path, "from penstock.shared.common import clock")))
    assert list(is_sans_io(python(path, "import penstock.shared.common.clock")))
    assert not list(is_sans_io(python(path, "from penstock.shared.common.clock import Clock")))
    for call in ("datetime.now(UTC)", "dt.datetime.now()", "dt.datetime.utcnow()", "dt.date.today()"):
        assert list(is_sans_io(python(path, f"now = {call}")))
    assert list(is_sans_io(python(path, "with open(path) as file: ...")))
    for method in ("exists", "mkdir", "open", "read_bytes", "read_text", "unlink", "write_bytes", "write_text"):
        assert list(is_sans_io(python(path, f"Path(name).{method}()")))
    assert not list(is_sans_io(python(path, "window.close()", "kept = path.write_text")))
    assert all(any(source.path.startswith(one) for source in checkout()) for one in SANS_IO)


def test_each_named_edge_is_one() -> None:
    """Each of the files at the edge is in a package that decides, and awaits, reads a clock or uses a file."""
    sources = {source.path: source for source in checkout()}
    for path in EDGE_FILES:
        assert path.startswith(tuple(one for one in SANS_IO if one.endswith("/"))), path
        assert list(uses_of_edges(sources[path])), path


def test_no_machine_paths() -> None:
    """No file contains a path of a developer's machine."""
    broken = Source("README.md", "cd /wo" + "rk/penstock")
    check_rule(names_no_machine_path, broken=broken, kept=Source("README.md", "GET /workers, http://host/tmpl, ./work"))
    assert list(names_no_machine_path(Source("a", "x = '/tm" + "p/x'")))


def test_no_registry_hosts() -> None:
    """No file names a package registry, which each machine configures."""
    kept = Source("requirements.lock", "httpx==1 --hash=sha256:00")
    check_rule(names_no_registry, broken=Source("requirements.lock", "--index" + "-url https://mirror"), kept=kept)
    assert list(names_no_registry(Source("a", "https://py" + "pi.org/simple")))


def test_there_are_no_import_cycles() -> None:
    """There are no import cycles, not even for type checking only."""
    with pytest.raises(CycleError):
        TopologicalSorter({"a": ["b"], "b": ["c"], "c": ["a"]}).prepare()
    graph = grimp.build_graph("penstock")
    TopologicalSorter({one: graph.find_modules_directly_imported_by(one) for one in graph.modules}).prepare()
