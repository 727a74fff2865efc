"""Runs contestants side by side: each round in its own process, in turns. The best round of each counts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Figures = dict[str, float]
Wanted = Iterable[tuple[str, str, float]]
"""`(ours, theirs, the minimum ratio of our rate to theirs)`."""


async def best_of(module: str, contestants: Iterable[str], arguments: Sequence[str], rounds: int) -> dict[str, Figures]:
    """Run `python -m module --one CONTESTANT arguments`, which prints its figures as JSON last; return the best."""
    best: dict[str, Figures] = {}
    for _ in range(rounds):
        for contestant in contestants:
            child = [sys.executable, "-m", module, "--one", contestant, *arguments]
            done = await asyncio.to_thread(subprocess.run, child, stdout=subprocess.PIPE, check=True, text=True)
            figures: Figures = json.loads(done.stdout.splitlines()[-1])
            known = best.get(contestant)
            if known is None or figures["records_per_second"] > known["records_per_second"]:
                best[contestant] = figures
    return best


def report(
    title: str,
    figures: dict[str, Figures],
    wanted: Wanted,
    *,
    rates: Mapping[str, float] | None = None,
    as_json: bool,
    more: dict[str, Any] | None = None,
) -> int:
    """Print figures, ratios and the target `rates` by contestant. The exit status is 1 if a target is missed.

    A contestant that was not measured, such as a missing peer, is reported and misses no target. `more` is added to the
    JSON.
    """
    print(title)
    width = max(map(len, figures))
    for contestant, of in figures.items():
        latency = f"  p99 {of['p99_ms']:7.1f} ms" if "p99_ms" in of else ""
        print(
            f"  {contestant:<{width}} {of['records_per_second']:>11,.0f} records/s  "
            f"{of['cpu_us_per_record']:5.2f} µs CPU a record{latency}"
        )
    ratios, missed = {}, False
    for ours, theirs, least in wanted:
        if absent := [name for name in (ours, theirs) if name not in figures]:
            print(f"  {ours} / {theirs}: not measured: {' and '.join(absent)} (target: {least})")
            continue
        ratio = figures[ours]["records_per_second"] / figures[theirs]["records_per_second"]
        ratios[f"{ours} / {theirs}"] = ratio
        missed |= ratio < least
        print(f"  {ours} / {theirs}: {ratio:.2f} (target: {least})")
    for name, least in (rates or {}).items():
        if name not in figures:
            print(f"  {name}: not measured (target: {least:,.0f} records/s)")
            continue
        missed |= figures[name]["records_per_second"] < least
        print(f"  {name}: {figures[name]['records_per_second']:,.0f} records/s (target: {least:,.0f})")
    if as_json:
        print(json.dumps({"figures": figures, "ratios": ratios, **(more or {})}))
    return int(missed)
