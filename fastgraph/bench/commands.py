"""From the command line to a bench, and from what it found to a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os.path import isfile  # of any text: Path raises for a name that no file can have
from pathlib import Path
from typing import Any

from fastgraph import models
from fastgraph.bench import (
    latency,
    measure,
    memory,
    report,
    roofline,
    serve,
    shapes,
    steps,
    throughput,
    with_shape,
    workloads,
)
from fastgraph.bench.workloads import Workload
from fastgraph.config import EngineConfig
from fastgraph.device.builder import settle_device, settle_dtype
from fastgraph.errors import ConfigError, ModelError
from fastgraph.llm import LLM
from fastgraph.loading.files import Progress
from fastgraph.terminal import Loading, load

# The workload's name -> what makes it, and which of its numbers --requests sets.
_SEEDED: dict[str, tuple[Callable[..., Workload], str]] = {
    "chat": (workloads.chat, "requests"),
    "repeated_sampling": (workloads.repeated_sampling, "samples"),
    "multi_turn": (workloads.multi_turn, "sessions"),
}


def run_latency(
    config: EngineConfig, batches: Sequence[int], options: dict[str, Any], step_options: dict[str, Any],
    json_to: str | None, profile: bool,
) -> None:  # fmt: skip
    report.check_destination(json_to)
    config = replace(config, prefix_cache=False)  # the same prompts come again, and are to be computed again
    device = settle_device(config)
    if step_options["arms"] is None:
        step_options["arms"] = steps.usual_arms(config, device)
    if profile and device.type == "cpu":
        raise ConfigError("--profile lists the kernels of a GPU, and this is a CPU")
    with _loaded(config) as (llm, limit, tell):
        shape = models.find(llm.checkpoint.config).Config.from_hf(llm.checkpoint.config)
        asked = {"batches": batches, "repeats": options["repeats"], **step_options}
        steps.check(config, shape.max_positions, device, **asked)
        rows = latency.bench(llm, limit, batches=batches, tell=tell, **options)
        found = report.assemble("latency", llm, config, options | step_options, limit, rows, measure.counters(llm))
        checkpoint = llm.checkpoint
    with Loading() as loading:  # the engine is closed: its memory is needed
        found["steps"] = steps.bench(
            with_shape(config), checkpoint, device, limit, batches=batches, repeats=options["repeats"],
            tell=loading.tell, **step_options,
        )  # fmt: skip
    report.publish(found, json_to)
    if profile:
        report.show_kernels(found["steps"]["decode"])


def run_load(config: EngineConfig, kind: str, options: dict[str, Any], json_to: str | None) -> None:
    """`kind` is "throughput" or "serve"."""
    report.check_destination(json_to)
    names = _names(options["workload"])
    with _loaded(config) as (llm, limit, tell):
        if options["decode_text"]:
            measure.check_tokenizer(llm)
        asked = {name: value for name, value in options.items() if name not in ("workload", "requests")}
        rows = []
        for name in names:
            workload = _workload(llm, name, options["requests"], options["seed"])
            if kind == "serve":
                row = serve.bench(llm, workload, tell=tell, **asked)
            else:
                row = throughput.bench(llm, limit, workload, tell=tell, **asked)
            rows.append({"workload": name} | row)
        found = report.assemble(kind, llm, config, options, limit, rows, measure.counters(llm))
        device = settle_device(config)
        dtype = settle_dtype(config, device)
        found["memory"] = memory.by_kind(llm.checkpoint.config, llm.limits, limit, dtype, device)
    report.publish(found, json_to)


@contextmanager
def _loaded(config: EngineConfig) -> Iterator[tuple[LLM, roofline.Roofline, Progress]]:
    """The engine, its roofline, and what shows progress."""
    device = settle_device(config)
    dtype, shaped = settle_dtype(config, device), with_shape(config)
    with Loading() as loading:
        loading.tell("measuring what the machine can do", None)
        peaks = roofline.measure_peaks(dtype, device)
    try:
        llm = load(shaped)
    except ModelError as error:
        if shaped is config and config.load_format == "dummy" and config.model is not None:
            raise ModelError(f"{error}. Shapes that are here by name: {', '.join(shapes())}") from error
        if (config.model or "").lower() in shapes():
            raise ModelError(f"{error}. With --load-format dummy it is here, with random weights") from error
        raise
    measure.spare_collector()
    with llm, Loading() as loading:
        yield llm, roofline.roofline_of(llm.checkpoint.config, dtype, peaks), loading.tell


def _names(workloads: str) -> list[str]:
    """Each a seeded workload or a file; there are commas between them, unless all of it is a file's name."""
    names = [workloads] if isfile(workloads) else workloads.split(",")
    for name in names:
        if name not in _SEEDED and not isfile(name):
            raise ConfigError(f"there is no workload {name}: take {', '.join(_SEEDED)} or a JSONL file")
    return names


def _workload(llm: LLM, workload: str, requests: int | None, seed: int) -> Workload:
    if workload in _SEEDED:
        build, counted = _SEEDED[workload]
        return build(seed=seed, **({counted: requests} if requests else {}))
    return workloads.from_file(Path(workload), llm.tokenizer, llm.limits.vocab)[:requests]
