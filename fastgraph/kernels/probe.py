"""What a model will ask of its kernels, found by running it on tensors that have shapes and no data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastgraph import models
from fastgraph.kernels import serving
from fastgraph.kernels.registry import Signature
from fastgraph.ops import Batch, LayerCache, cache_width

_FUSED_ON_CPU = {"rope", "norms"}  # there the compiler, or PyTorch, computes them before attention


def signature_of(config: Mapping[str, Any], device: str, dtype: torch.dtype, page_size: int, graphs: bool) -> Signature:
    """The signature of a checkpoint's model. Reads no weights. Raises `ModelError` for a model that cannot be run.

    config: config.json. graphs: whether CUDA graphs record decode steps.
    """
    module = models.find(config)
    shape = module.Config.from_hf(config)
    with torch.inference_mode(), torch.device("meta"), serving.asked() as features:
        model = module.Model(shape)
        tokens, row = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        batch = Batch(tokens, tokens, tokens, tokens, row, tokens, row, row[None])
        page = torch.empty(1, page_size, shape.kv_heads, cache_width(shape.head_dim, device))
        x, shared = model.embed(batch)
        for layer in model.layers:
            x = layer(x, shared, LayerCache(page, page), batch)
    return Signature(
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=cache_width(shape.head_dim, device),
        page_size=page_size,
        hidden=shape.hidden,
        vocab=shape.vocab,
        layers=shape.layers,
        features=frozenset(features - (_FUSED_ON_CPU if device == "cpu" else set())),
        capability=capability(device),
        graphs=graphs,
        intermediate=getattr(shape, "expert_width", getattr(shape, "intermediate", 0)),
        experts=getattr(shape, "experts", 0),
        top_k=getattr(shape, "top_k", 0),
    )


def typical(device: str, dtype: str = "bfloat16") -> Signature:
    """What most models ask: that of Llama 3.1 8B."""
    features = frozenset({"rope"} if device == "cuda" else ())
    sizes = (32, 8, 128, 16, 4096, 128256, 32)
    return Signature(device, dtype, *sizes, features, capability(device), device == "cuda", intermediate=14336)


def capability(device: str) -> tuple[int, int]:
    """The compute capability of the GPU; (0, 0) of a CPU."""
    return torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
