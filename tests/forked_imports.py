"""Runs several pieces of code in forks of one new Python, so that what they share is imported once."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.documents import ROOT

_FORKS = """
import gc, json, os, sys, traceback
gc.disable()  # imports are faster without it
shared, *codes = json.load(sys.stdin)
exec(shared)
for code in codes:
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.dup2(writing, 1)
        status = 1
        try:
            exec(code, {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as output:
        print(json.dumps([output.read(), os.waitpid(child, 0)[1]]), flush=True)
"""


def ran_in_forks(shared: str, *codes: str) -> list[str]:
    """Run `shared` in a new Python, then each code in a fork of it; return what each printed. None may raise."""
    command = [sys.executable, "-c", _FORKS]
    ran = subprocess.run(
        command, cwd=ROOT, input=json.dumps([shared, *codes]), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    done = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(done) == len(codes), ran.stdout
    assert [code for code, (_, status) in zip(codes, done, strict=True) if status] == [], ran.stderr
    return [output for output, _ in done]
