"""README.md and the documents about running Penstock are correct: Python blocks print what
they show, and commands are accepted.

A Python block that starts with a comment with a file's name is that file, which later blocks can import. Comment lines
right after a `print` are its output. Commands come from the shell blocks; each is parsed by its own settings or
options, but no service is started.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.main import get_command

from penstock.services.admin.settings import AdminServiceSettings
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.cli import COMMANDS
from penstock.services.consumer import dlq_command
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.services.local.demo import main as demo
from penstock.services.local.settings import UpSettings
from penstock.services.producer.settings import ProducerServiceSettings
from penstock.services.spark.audit.settings import AuditSettings
from penstock.services.spark.batch.settings import BatchSettings
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.common.setting_names import ENV_PREFIX
from penstock.shared.common.settings import CommandSettings
from tests.documents import DOCS, README, ROOT, blocks

TIMEOUT_S = 60
DOCUMENTS = (README, DOCS / "deployment.md", DOCS / "demo.md")
README_LINES_MAX = 150
RUN_EACH = """
import runpy, sys
for script in sys.argv[1:]:
    print(script)
    runpy.run_path(script, run_name="__main__")
"""
NO_FILE = {f"{ENV_PREFIX}CONFIG": os.devnull}  # nor a penstock.toml of the current folder
SETTINGS: dict[str, type[CommandSettings]] = {
    "up": UpSettings,
    "producer": ProducerServiceSettings,
    "consumer": ConsumerServiceSettings,
    "aggregator": AggregatorSettings,
    "admin": AdminServiceSettings,
    "compact": CompactSettings,
    "audit": AuditSettings,
    "batch": BatchSettings,
}
OPTIONS = {"demo": demo.app, "dlq": dlq_command.app}


def file_name(block: str) -> str | None:
    found = re.match(r"# ([a-z_]+\.py)\n", block)
    return found[1] if found else None


def printed(block: str) -> str:
    """The output that a block's comments show.

    >>> printed("# a comment\\nprint('a\\\\nb')\\n# a\\n# b\\ny = 2\\n# a comment\\n")
    'a\\nb\\n'
    """
    printed, after_print = [], False
    for line in block.splitlines():
        after_print = line.startswith("print(") or (after_print and line.startswith("# "))
        if after_print and line.startswith("# "):
            printed.append(f"{line[2:]}\n")
    return "".join(printed)


def commands() -> Iterator[list[str]]:
    """The words of each command in the shell blocks."""
    for document in DOCUMENTS:
        for block in blocks(document, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield words


def test_python_blocks_run_and_print_what_they_show(tmp_path: Path) -> None:
    """README's Python blocks run as programs, one after the other, and print what their comments show."""
    found = blocks(README)
    assert any(map(printed, found)), "no block shows what it prints"
    scripts = [tmp_path / (file_name(block) or f"block_{number}.py") for number, block in enumerate(found)]
    for script, block in zip(scripts, found, strict=True):
        script.write_text(block, encoding="utf-8")
    command = [sys.executable, "-c", RUN_EACH, *map(str, scripts)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "".join(f"{script}\n{printed(block)}" for script, block in zip(scripts, found, strict=True))


def test_commands_are_accepted() -> None:
    """Every flag and variable of a command in the shell blocks exists and accepts its value."""
    environ: dict[str, str] = {}
    checked = set()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for program, *arguments in commands():
        if program == "export":
            environ |= dict(argument.split("=", 1) for argument in arguments)
        elif program == "scripts/penstock":
            assert (ROOT / program).is_file()
            check_penstock(arguments[0], arguments[1:], environ)
            checked.add(arguments[0])
        elif program == "scripts/demo":
            check_penstock("demo", arguments, environ)
            checked.add("demo")
        elif program.startswith("scripts/"):
            assert (ROOT / program).is_file(), program
            if program == "scripts/bench":
                assert (ROOT / "bench" / f"{arguments[0]}.py").is_file(), arguments
        elif program == "pip":
            assert arguments[0] == "install"
            assert Requirement(arguments[1]).name == "penstock"
            assert Requirement(arguments[1]).extras <= extras.keys()
        else:
            pytest.fail(f"a document shows a command that this test does not know: {program}")
    assert checked, "the documents show no command"


def check_penstock(name: str, arguments: list[str], environ: dict[str, str]) -> None:
    assert name in COMMANDS, name
    if name in OPTIONS:
        get_command(OPTIONS[name]).make_context(name, list(arguments), resilient_parsing=False)
    else:
        variables = {variable: value for variable, value in environ.items() if variable.startswith(ENV_PREFIX)}
        SETTINGS[name].load(arguments, program=f"penstock {name}", environ=variables | NO_FILE)


def test_commands_in_the_text_exist() -> None:
    """Each `penstock NAME` and `scripts/NAME` in the text, a table or a code block exists."""
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    named = set(re.findall(r"`penstock ([a-z]+)[ `]", text))
    assert named
    assert named <= COMMANDS.keys()
    assert all((ROOT / script).is_file() for script in re.findall(r"`(scripts/[a-z]+)", text))


def test_the_check_finds_unknown_commands() -> None:
    """The check rejects an unknown command, flag, value or variable."""
    for name, arguments, environ in (
        ("nothing", [], {}),
        ("up", ["--no-such-flag", "1"], {}),
        ("up", ["--partitions", "few"], {}),
        ("up", [], {"PENSTOCK_HTTP__NO_SUCH": "1"}),
        ("demo", ["--no-such-flag"], {}),
    ):
        with pytest.raises(Exception, match=r"nothing|no-such-flag|partitions|NO_SUCH"):
            check_penstock(name, arguments, environ)


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them.

    >>> sorted(anchors("# A `b-c`, d_e\\n```sh\\n# a comment\\n```\\n## F: g\\n### F: g\\n"))
    ['a-b-c-d_e', 'f-g', 'f-g-1']
    """
    found: Counter[str] = Counter()
    made = set()
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ +(.+?) *$", without_code, re.MULTILINE):
        name = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        made.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return made


def broken_links(document: Path, text: str) -> list[str]:
    """The relative links of a document's text to no file of the checkout, or to no heading of a document."""
    found = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)", text):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


def test_relative_links_exist() -> None:
    """Every relative link of a document is a file of the checkout, and its anchor a heading of that file."""
    text = "[a](nothing.md) [b](README.md#nothing) [c](#nothing) [d](README.md) [e](docs/streams.md) [f](https://x#y)"
    assert broken_links(README, text) == ["nothing.md", "README.md#nothing", "#nothing"]
    documents = (*ROOT.glob("*.md"), *DOCS.glob("*.md"), ROOT / "bench" / "README.md")
    broken = {one.name: broken_links(one, one.read_text(encoding="utf-8")) for one in documents}
    assert not {name: links for name, links in broken.items() if links}


def test_the_readme_is_short() -> None:
    """README has at most README_LINES_MAX lines."""
    assert len(README.read_text(encoding="utf-8").splitlines()) <= README_LINES_MAX
