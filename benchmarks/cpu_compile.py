"""What compiling buys on this CPU: seconds until the first answer, cold and warm, and decode speed of SmolLM2's shape.

    python benchmarks/cpu_compile.py [--arms eager,block,whole,...] [--dtypes float32,bfloat16]

Each arm runs in two new processes that share a new inductor cache folder: the first is cold, the second warm. Weights
are random, so nothing is downloaded. "ready" counts from the model's construction to the first decoded token.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

# How the model is compiled, and the inductor options that differ from torch's own.
AUTOTUNE = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("eager", {}),
    "block": ("block", {}),
    "block, no precompiled headers": ("block", {"cpp_cache_precompile_headers": False}),
    "block, no vector checks": ("block", {"cpp.vec_isa_ok": True}),
    "block, neither": ("block", {"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}),
    "block, autotuned": ("block", AUTOTUNE),
    "whole": ("whole", {}),
    "whole, no precompiled headers": ("whole", {"cpp_cache_precompile_headers": False}),
    "whole, autotuned": ("whole", AUTOTUNE),
    "whole, frozen": ("whole", {"freezing": True}),
    "whole, frozen, autotuned": ("whole", {"freezing": True, **AUTOTUNE}),
}
CONTEXT = 300
PAGES_PER_ROW = 24
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def measure(arm: str, dtype: str) -> dict[str, float]:
    """Build the model, compile it as `arm` says, and time it. Runs in a process of its own."""
    import torch
    from torch import Tensor
    from torch._dynamo.decorators import mark_unbacked

    from fastgraph.models import llama
    from fastgraph.ops import Batch, LayerCache

    mode, options = ARMS[arm]
    torch.set_grad_enabled(False)
    torch.set_default_dtype(getattr(torch, dtype))
    started, cpu_started = time.perf_counter(), time.process_time()
    config = llama.Config.from_hf(SMOLLM2)
    model = llama.Model(config).requires_grad_(False)
    rows = 8
    pool = (rows * PAGES_PER_ROW + 1, 16, config.kv_heads, config.head_dim)
    caches = [LayerCache(torch.zeros(pool), torch.zeros(pool)) for _ in range(config.layers)]
    table = torch.zeros(rows + 1, PAGES_PER_ROW, dtype=torch.int32)
    table[1:] = torch.arange(1, rows * PAGES_PER_ROW + 1, dtype=torch.int32).view(rows, PAGES_PER_ROW)

    def batch(count: int, past: int, each: int = 1) -> Batch:
        slots = torch.arange(1, count + 1, dtype=torch.int32)
        positions = torch.arange(past, past + each, dtype=torch.int32).repeat(count)
        starts = torch.arange(0, count * each + 1, each, dtype=torch.int32)
        lengths = torch.full((rows + 1,), past, dtype=torch.int32)
        lengths[0] = 0
        return Batch(positions, positions, positions + 1, slots.repeat_interleave(each), slots, starts, lengths, table)

    def mark(name: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            mark_unbacked(tensor, 0, shape_id=name)

    def compiled(function: Any) -> Any:
        return function if mode == "eager" else torch.compile(function, fullgraph=True, options=options or None)

    def blocks(inputs: Batch) -> Tensor:
        x, rope = model.embed(inputs)
        for layer, cache in zip(model.layers, caches, strict=True):
            x = layer(x, rope, cache, inputs)
        return x

    whole = compiled(blocks)
    embed, block, head = compiled(model.embed), compiled(llama.Block.forward), compiled(model.head)

    def step(inputs: Batch) -> Tensor:
        mark("tokens", *inputs[:4])
        mark("rows", inputs.slots)
        mark("starts", inputs.query_start)
        if mode == "whole":
            x = whole(inputs)
        else:
            x, rope = embed(inputs)
            for layer, cache in zip(model.layers, caches, strict=True):
                mark("tokens", x, *rope)
                x = block(layer, x, rope, cache, inputs)
        x = x[inputs.query_start[1:] - 1]
        mark("rows", x)
        return head(x).argmax(-1)

    step(batch(1, 0, 32))
    step(batch(1, 32))
    report = {"ready": time.perf_counter() - started, "cpu": time.process_time() - cpu_started}
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    report["cpu"] += children.ru_utime + children.ru_stime
    with torch.compiler.set_stance("default" if mode == "eager" else "fail_on_recompile"):
        for count in (1, 8):
            times = []
            for i in range(30):
                inputs = batch(count, CONTEXT + i)
                before = time.perf_counter()
                step(inputs)
                times.append(time.perf_counter() - before)
            report[f"tok/s at {count}"] = count / sorted(times)[len(times) // 3]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arms", default="eager,block,whole", help=f"any of: {'; '.join(ARMS)} (separated by ;), or all"
    )
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--child", nargs=2, metavar=("ARM", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(*arguments.child)))
        return
    separator = ";" if ";" in arguments.arms or arguments.arms in ARMS else ","
    arms = list(ARMS) if arguments.arms == "all" else [arm.strip() for arm in arguments.arms.split(separator)]
    print(f"{'dtype':9} {'arm':32} {'cold s':>7} {'cpu s':>7} {'warm s':>7} {'cpu s':>7} {'tok/s 1':>8} {'tok/s 8':>8}")
    for dtype in arguments.dtypes.split(","):
        for arm in arms:
            with tempfile.TemporaryDirectory() as folder:
                # Precompiled headers stand in the temporary folder, wherever the cache is.
                environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "TMPDIR": folder}
                command = [sys.executable, __file__, "--child", arm, dtype]
                reports = []
                for _ in ("cold", "warm"):
                    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
                    if done.returncode:
                        break
                    reports.append(json.loads(done.stdout.splitlines()[-1]))
            if len(reports) < 2:
                print(f"{dtype:9} {arm:32} failed", flush=True)
                continue
            cold, warm = reports
            seconds = [cold["ready"], cold["cpu"], warm["ready"], warm["cpu"]]
            speeds = [max(cold[name], warm[name]) for name in ("tok/s at 1", "tok/s at 8")]
            row = " ".join([f"{s:7.1f}" for s in seconds] + [f"{s:8.1f}" for s in speeds])
            print(f"{dtype:9} {arm:32} {row}", flush=True)


if __name__ == "__main__":
    main()
