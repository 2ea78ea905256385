"""Measuring which implementation of an op is the fastest, at start, where several can serve.

For each of a few numbers of rows: whoever gives what the reference gives is timed, and the median of several runs
decides. What was found is kept beside the compiled code, and found again as long as the machine, the versions, the
kernels' source and the model's sizes are the same. An implementation with settings to choose from registers one
`Implementation` for each.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import fastgraph
from fastgraph import compile_cache
from fastgraph.errors import FastgraphWarning
from fastgraph.kernels import serving
from fastgraph.kernels.problems import TOLERANCE, error, problem
from fastgraph.kernels.registry import Choice, Implementation, Kernel, Signature
from fastgraph.loading.files import Progress

ROWS = (1, 8, 64, 256, 1024, 4096)  # what is measured, up to the most that a step may have
RUNS = 7
_ONE_A_REQUEST = ("decode_attention", "sample")  # rows; the other ops get tokens
RECORD = "kernels.json"
_CODE = (".py", ".cu", ".cuh", ".cpp", ".h")
_COLD = 1 << 28  # bytes that runs go through in turn: more than any cache holds


def tune(
    choices: Mapping[str, Choice], signature: Signature, slots: int, step_tokens: int, progress: Progress
) -> dict[str, Choice]:
    """The choices, with the fastest of several candidates for each number of rows.

    slots, step_tokens: requests that decode at once and tokens of a step, at most. Forced choices, and ops that one
    implementation can serve, stay. Candidates that fail or give something else than the reference are left out, with a
    warning.
    """
    record, found = compile_cache.read(RECORD), {}
    for op, choice in choices.items():
        most, able = slots if op in _ONE_A_REQUEST else step_tokens, _competitors(choice)
        key = _key(choice, able, signature)
        if able and record.get(key, {}).get("most", 0) < most:
            rows = [*(n for n in ROWS if n < most), most]
            found[key] = {"most": most, **_measure(able, signature, rows, progress)}
    if found:
        compile_cache.add(RECORD, found)
    return recall(choices, signature)


def recall(choices: Mapping[str, Choice], signature: Signature) -> dict[str, Choice]:
    """The choices, with what was measured before; those of which nothing is known stay."""
    record, known = compile_cache.read(RECORD), dict(choices)
    for op, choice in choices.items():
        able = _competitors(choice)
        found = record.get(_key(choice, able, signature))
        if able and found:
            wrong: dict[str, str] = found["wrong"]
            left = tuple(i for i in choice.candidates if i.name not in wrong)
            refused = tuple((i, wrong[i.name]) for i in able if i.name in wrong)
            fastest = {int(rows): name for rows, name in found["fastest"].items()}
            known[op] = replace(choice, candidates=left, refused=(*choice.refused, *refused), fastest=fastest)
    return known


def _competitors(choice: Choice) -> list[Implementation]:
    """Those to be measured, if they are several. The reference competes only where it would serve."""
    able = [i for i in choice.candidates if i.name != "reference" or i is choice.candidates[0]]
    return able if len(able) > 1 and not choice.forced else []


def _key(choice: Choice, able: list[Implementation], signature: Signature) -> str:
    asked = asdict(signature) | {"features": sorted(signature.features)}
    judge = _source(__name__)  # the problems and the reference
    return json.dumps([choice.op, asked, judge, [[i.name, _version(i)] for i in able]])


def _version(implementation: Implementation) -> str:
    versions = [str(getattr(importlib.import_module(name), "__version__", "")) for name in implementation.packages]
    load: Any = implementation.load
    while isinstance(load, partial):
        load = load.func
    return " ".join([implementation.version or fastgraph.__version__, *versions, _source(load.__module__)])


@cache
def _source(module: str) -> str:
    """A hash of a module's code, so that who edits a kernel has it measured again; "" if there is none to read.

    Modules of a package help each other: all that stand in the same folder count.
    """
    found = sys.modules.get(module)
    file = Path(getattr(found, "__file__", None) or "")
    if not file.is_file():
        return ""
    together = [path for path in file.parent.iterdir() if path.suffix in _CODE]
    files = sorted(together) if getattr(found, "__package__", "") else [file]
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()[:16]


def _measure(able: list[Implementation], signature: Signature, rows: list[int], progress: Progress) -> dict[str, Any]:
    """Names of the fastest by rows, and those that are wrong with the reason."""
    op, wrong, fastest = able[0].op, {}, {}
    kernels = {i.name: (i, i.load()) for i in able}
    for done, n in enumerate(rows):
        times = {}
        for part, (name, (implementation, kernel)) in enumerate(kernels.items()):
            progress(f"measuring kernels for {op}", (done + part / len(kernels)) / len(rows))
            if name in wrong or n > (implementation.max_rows or n):
                continue
            in_graph = signature.graphs and implementation.capturable
            fault, time = _judge(kernel, op, signature, n, in_graph)
            if fault:
                wrong[name] = f"{fault} of {n} rows"
                warnings.warn(f"{op}: {name} is left out: {wrong[name]}", FastgraphWarning, stacklevel=2)
            else:
                times[name] = time
        if times:
            fastest[n] = min(times, key=times.__getitem__)
    return {"fastest": {n: name for n, name in fastest.items() if name not in wrong}, "wrong": wrong}


def _judge(kernel: Kernel, op: str, signature: Signature, rows: int, in_graph: bool) -> tuple[str, float]:
    """What is wrong with a kernel, "" if nothing is; and the time of a call."""
    try:
        far = error(kernel, op, signature, rows)
        fault = "" if far <= TOLERANCE[signature.dtype] else f"is {far:.2g} off the reference"
        return fault, 0.0 if fault else seconds(kernel, op, signature, rows, in_graph)
    except Exception as failure:  # whatever a kernel does, an engine starts without it
        return f"fails with {type(failure).__name__}: {failure}", 0.0


@torch.inference_mode()
def seconds(kernel: Kernel, op: str, signature: Signature, rows: int, in_graph: bool) -> float:
    """Median time of a call, of steps that call it once for each layer.

    What a graph can record is timed in one, prefill too: steps that keep the host busy longer than the device are
    captured, and in others the host does not count.
    """
    problems = [problem(op, signature, rows)]
    size = sum(x.nbytes for x in tree_leaves(problems) if isinstance(x, torch.Tensor))
    on_gpu = signature.device == "cuda"
    layers = signature.layers if on_gpu else 1  # a plan that is made once a step is paid once
    copies = min(max(_COLD // size, 1), layers)
    problems += [problem(op, signature, rows, seed) for seed in range(1, copies)]

    def step() -> None:
        serving.begin_step()
        for layer in range(layers):
            kernel(*problems[layer % copies])

    step()
    run = step
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # as in `fastgraph.device.ladder`
            step()
        run = graph.replay
    times = []
    for _ in range(RUNS + 1):
        _wait(on_gpu)
        begin = perf_counter()
        run()
        _wait(on_gpu)
        times.append(perf_counter() - begin)
    return median(times[1:]) / layers


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
