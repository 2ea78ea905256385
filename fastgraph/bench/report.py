"""Showing what a bench found: a table for people, JSON for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fastgraph.bench.limit import FORMULA as LIMIT_FORMULA
from fastgraph.bench.load import PERCENTILES
from fastgraph.bench.roofline import EXPERTS_FORMULA, FLOPS_FORMULA, FORMULA, Roofline
from fastgraph.bench.steps import REST
from fastgraph.config import EngineConfig, check_writable
from fastgraph.env import report as environment
from fastgraph.errors import ConfigError
from fastgraph.llm import LLM

# Heading -> (figure, factor to show it by, decimals)
_LATENCY = {
    "TTFT ms": ("ttft", 1e3, 1),
    "TPOT ms": ("tpot", 1e3, 2),
    "ITL p50 ms": ("itl_p50", 1e3, 2),
    "ITL p95 ms": ("itl_p95", 1e3, 2),
    "output tok/s": ("output_tokens_per_second", 1, 1),
    "step ms": ("decode_step", 1e3, 2),
    "roofline %": ("roofline_share", 100, 1),
}
_STEPS = {
    "measured at": ("mean_context", 1, 0),
    "step ms": ("step", 1e3, 3),
    "host us": ("host", 1e6, 1),
    "tok/s": ("tokens_per_second", 1, 1),
    "roofline %": ("roofline_share", 100, 1),
    "matmul %": ("matmul_share", 100, 1),
}
_LOAD = {
    "requests/s": ("requests_per_second", 1, 2),
    "output tok/s": ("output_tokens_per_second", 1, 1),
    "total tok/s": ("total_tokens_per_second", 1, 1),
    "steady output tok/s": ("steady_tokens_per_second", 1, 1),
    "share of the limit %": ("limit_share", 100, 1),
    "share of what lasts %": ("lasting_share", 100, 1),
    "device idle %": ("idle_share", 100, 1),
    "steady device idle %": ("steady_idle_share", 100, 1),
    "prefix hits %": ("hit_rate", 100, 1),
    "padding %": ("padding_share", 100, 1),
    "largest batch": ("largest_batch", 1, 0),
    "tokens a step": ("step_tokens", 1, 1),
    "seconds": ("seconds", 1, 2),
    "steady seconds": ("steady_seconds", 1, 2),
}
_TIMES = {"queued": "queued", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}


def assemble(
    kind: str, llm: LLM, config: EngineConfig, options: Mapping[str, Any], roofline: Roofline,
    rows: Sequence[Mapping[str, Any]], counters: Mapping[str, int],
) -> dict[str, Any]:  # fmt: skip
    """Everything about a bench that someone needs to repeat it or to doubt it."""
    from fastgraph.device.builder import dtype_name, settle_compile, settle_device, settle_dtype

    device = settle_device(config)
    settled = {
        "device": device.type,
        "dtype": dtype_name(settle_dtype(config, device)),
        "compile": settle_compile(config, device),
    }
    found = environment()
    kept = ("fastgraph", "python", "system", "packages", "cpu", "gpus", "kernels")
    return {
        "bench": kind,
        "model": llm.checkpoint.name,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "options": dict(options),
        "engine": {name: value for name, value in asdict(config).items() if name != "token"} | settled,
        "limits": asdict(llm.limits),
        "environment": {name: found[name] for name in kept if name in found},
        "roofline": {**asdict(roofline), "formula": FORMULA + (EXPERTS_FORMULA if roofline.experts else "")},
        "rows": [dict(row) for row in rows],
        "counters": dict(counters),
    }


def check_destination(json_to: str | None) -> None:
    """Refuse to begin what could not be written down. Raises `ConfigError`."""
    if json_to not in (None, "-"):
        check_writable("the JSON", str(json_to))


def publish(found: Mapping[str, Any], json_to: str | None) -> None:
    """Print the table on stdout, and write the JSON to a file. With "-", JSON has stdout and the table stderr."""
    show(found, Console(highlight=False, stderr=json_to == "-"))
    text = json.dumps(found, indent=2) + "\n"
    if json_to == "-":
        sys.stdout.write(text)
    elif json_to is not None:
        try:
            Path(json_to).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the JSON cannot be written: {error}") from error


def show(found: Mapping[str, Any], console: Console) -> None:
    """Each figure is the median of the repeats, with the least and the most of them beside or under it."""
    engine, options, roofline = found["engine"], found["options"], found["roofline"]
    if not console.is_terminal:
        console.width = 1000  # a pipe has no edge
    console.print(
        f"{found['bench']} of {found['model']}: {engine['device']}, {engine['dtype']}, compile {engine['compile']}, "
        + ", ".join(f"{name} {value}" for name, value in options.items() if value is not None)
    )
    if found["bench"] == "latency":
        _show_latency(found, console)
    else:
        for row in found["rows"]:
            _show_load(row, console)
    repeats = options["repeats"]
    console.print(f"Median, least and most of {repeats} repeats." if repeats > 1 else "Of one repeat.")
    formulas = {"latency": roofline["formula"], "throughput": LIMIT_FORMULA}
    if found["bench"] in formulas:
        console.print(
            f"{formulas[found['bench']]}; here {_bytes(roofline['weights'])}, {_bytes(roofline['kv_token'])} and "
            f"{roofline['bandwidth'] / 1e9:.1f} GB/s, measured now."
        )
        if found["bench"] == "latency":
            console.print(f"{FLOPS_FORMULA}.")
        console.print(
            f"The rate of a large product is {roofline['matmul'] / 1e12:.2f} TFLOP/s at best, and "
            f"{roofline['lasting'] / 1e12:.2f} when it goes on for half a second, measured now: what lasts is the "
            f"second."
        )
    if "memory" in found:
        console.print("Memory: " + ", ".join(f"{kind} {_bytes(count)}" for kind, count in found["memory"].items()))
    console.print(_counts(found["counters"]))


def _counts(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counters.items())


def _show_latency(found: Mapping[str, Any], console: Console) -> None:
    table = _table("batch", *_LATENCY, on=console)
    for row in found["rows"]:
        for label, of, style in ((str(row["batch"]), "median", ""), ("least", "min", "dim"), ("most", "max", "dim")):
            figures = (_number(row[name][of], factor, decimals) for name, factor, decimals in _LATENCY.values())
            table.add_row(label, *figures, style=style)
    console.print(table)
    if "steps" in found:
        _show_steps(found["steps"], console)


def _show_load(row: Mapping[str, Any], console: Console) -> None:
    table = _table(f"{row['workload']}, {row['requests']} requests", "median", "least", "most", on=console)
    for label, (name, factor, decimals) in _LOAD.items():
        if name in row:
            table.add_row(label, *(_number(row[name][of], factor, decimals) for of in ("median", "min", "max")))
    console.print(table)
    table = _table("ms, medians of", *(f"p{share}" for share in PERCENTILES), on=console)
    for name, label in _TIMES.items():
        table.add_row(label, *(_number(row[f"{name}_p{share}"]["median"], 1e3, 1) for share in PERCENTILES))
    console.print(table)


def _table(*headings: str, on: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD if on.is_terminal else None, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _show_steps(steps: Mapping[str, Any], console: Console) -> None:
    """What one step costs, medians alone: the JSON has the spread."""
    table = _table("batch", "context", "arm", *_STEPS, "GB", "GFLOP", "kernels", on=console)
    for row in steps["decode"]:
        figures = (_number(row[name]["median"], factor, decimals) for name, factor, decimals in _STEPS.values())
        work = (f"{row['bytes'] / 1e9:.2f}", f"{row['flops'] / 1e9:.1f}", _number(row["kernels_per_step"], 1, 1))
        table.add_row(str(row["batch"]), str(row["context"]), row["arm"], *figures, *work)
    console.print("A decode step:")
    console.print(table)
    for arm, counters in steps["counters"].items():
        console.print(f"{arm}: " + _counts(counters))
    for row in steps["prefill"]:
        seconds, share, lasting = (row[name]["median"] for name in ("seconds", "matmul_share", "lasting_share"))
        console.print(
            f"Prefill of {row['tokens']} tokens ({row['arm']}): {seconds * 1e3:.1f} ms, "
            f"{row['flops'] / 1e12:.2f} TFLOP, {share:.1%} of the measured matmul rate, {lasting:.1%} of what lasts."
        )
        seconds, share = (row[name]["median"] for name in ("rested_seconds", "rested_share"))
        if seconds is not None:
            console.print(f"  After a rest of {REST:.0f} s: {seconds * 1e3:.1f} ms, {share:.1%} of the matmul rate.")


def show_kernels(rows: Sequence[Mapping[str, Any]]) -> None:
    """The kernels of each measured step. They overlap, so their times may add up to more than the step."""
    for row in rows:
        if row["kernels"]:
            print(f"\nKernels of a step, {row['arm']}, batch {row['batch']}, context {row['context']}:")
        for kernel in row["kernels"]:
            print(f"{kernel['seconds'] * 1e6:10.1f} us {kernel['times']:7.1f} x {kernel['name'][:100]}")


def _number(value: float | None, factor: float, decimals: int) -> str:
    return "-" if value is None else f"{value * factor:.{decimals}f}"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count} bytes"
