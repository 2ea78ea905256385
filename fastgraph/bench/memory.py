"""Where the memory is, in bytes by kind."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from fastgraph import models
from fastgraph.bench.roofline import Roofline
from fastgraph.control.plan import Limits


def by_kind(
    config: Mapping[str, Any], limits: Limits, roofline: Roofline, dtype: torch.dtype, device: torch.device
) -> dict[str, int]:
    """`weights` and `kv` (the pages); on a GPU also the `other` tensors, what captured `graphs` keep for theirs, what
    torch has `reserved` beside all that (freed memory), what is used `outside` torch (the driver, graphs themselves,
    other processes) and what is `free`; on a CPU the most that the `process` has had.
    """
    module = models.find(config)
    with torch.device("meta"):
        model = module.Model(module.Config.from_hf(config))
    weights = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    kv = (limits.pages + 1) * limits.page_size * roofline.kv_token
    found = {"weights": weights, "kv": kv}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        own = [s for s in segments if s["device"] == index and tuple(s["segment_pool_id"]) != (0, 0)]
        graphs, alive = (sum(s[size] for s in own) for size in ("total_size", "allocated_size"))
        found |= {"other": allocated - alive - weights - kv, "graphs": graphs}
        found |= {"reserved": reserved - graphs - (allocated - alive)}
        found |= {"outside": total - free - reserved, "free": free}
    elif sys.platform != "win32":
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found["process"] = most if sys.platform == "darwin" else most * 1024
    return found
