"""The least time that a step can take: the bytes it must read, or the products it must compute, at the rates measured
on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from fastgraph import models

_MATRIX = {"cpu": 1024, "cuda": 8192}  # rows and columns of the product that the machine's rate is measured with
FORMULA = "roofline = least time of a decode step = (weights + context tokens of all requests * KV of one) / bandwidth"
EXPERTS_FORMULA = (
    "; of experts' weights a share counts, 1 - (1 - experts of a token / experts)^requests, as if all were as likely"
)
FLOPS_FORMULA = (
    "matmul share = (2 * weights * tokens + 4 * layers * heads * head_dim * pairs of tokens that see each other) / "
    "seconds / rate of a large product"
)

_BUFFER = {"cpu": 2**29, "cuda": 2**32}  # bytes: far beyond any cache, and small beside the model
_TRIALS = 5
_WARM = 0.25  # seconds, after which a GPU has come down to the clock that its power allows for products


@dataclass(frozen=True, slots=True)
class Roofline:
    """Bytes that decoding must read, and how fast they can be read."""

    weights: int  # bytes that every step reads: all but routed experts, and an embedding that is only looked up
    kv_token: int  # bytes of keys and values for a token of context
    bandwidth: float  # bytes a second, the best seen
    token_flops: int = 0  # of the products with the weights of the layers, for a token
    head_flops: int = 0  # of the product with the head's weights, for a token that is sampled
    context_flops: int = 0  # of attention, for a token and a token that it sees
    matmul: float = inf  # FLOP a second of a large product, the best seen
    lasting: float = inf  # the same for a product that goes on and on: what power and heat allow
    experts: int = 0  # bytes of all routed experts
    routed: float = 1.0  # the share of the experts that a token goes to

    def step_seconds(self, batch: int, context: float) -> float:
        """The least time of a decode step of `batch` rows. context: tokens of all its requests together."""
        return self.step_bytes(batch, context) / self.bandwidth

    def step_bytes(self, batch: int, context: float) -> float:
        """What a decode step of `batch` rows must read: of the experts, what rows that choose by chance come upon."""
        met = 1 - (1 - self.routed) ** batch
        return self.weights + met * self.experts + context * self.kv_token

    def step_flops(self, batch: int, context: float) -> float:
        """What a decode step must compute for `batch` rows with `context` tokens together."""
        return batch * (self.token_flops + self.head_flops) + context * self.context_flops

    def prefill_flops(self, tokens: int) -> float:
        """What the prefill of one prompt must compute: half of all pairs are causal, and one token is sampled."""
        return tokens * self.token_flops + self.head_flops + tokens * (tokens + 1) / 2 * self.context_flops


class Peaks(NamedTuple):
    """What a machine can do."""

    bandwidth: float  # bytes a second
    matmul: float  # FLOP a second, at best
    lasting: float  # FLOP a second, going on


def measure_peaks(dtype: torch.dtype, device: torch.device) -> Peaks:
    """Measured now, in memory that is free: before an engine takes it."""
    peaks = Peaks(read_bandwidth(device), *matmul_rates(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return peaks


def roofline_of(config: Mapping[str, Any], dtype: torch.dtype, peaks: Peaks) -> Roofline:
    """The roofline of a Hugging Face config's model on a machine."""
    module = models.find(config)
    shape = module.Config.from_hf(config)
    with torch.device("meta"):
        model: nn.Module = module.Model(shape)
    read = sum(parameter.numel() for parameter in model.parameters())
    looked_up = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Embedding))
    if not shape.tied:
        read -= looked_up
    experts = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 3)
    routed = shape.top_k / shape.experts if experts else 1.0
    head = shape.vocab * shape.hidden
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim
    return Roofline(
        weights=(read - experts) * dtype.itemsize,
        kv_token=kv * dtype.itemsize,
        bandwidth=peaks.bandwidth,
        token_flops=2 * (read - head - experts) + int(2 * experts * routed),
        head_flops=2 * head,
        context_flops=4 * shape.layers * shape.heads * shape.head_dim,  # q by k, and weights by v
        matmul=peaks.matmul,
        lasting=peaks.lasting,
        experts=experts * dtype.itemsize,
        routed=routed,
    )


def matmul_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP a second of a square product: the best of several trials, and the median after `_WARM` seconds of them.

    Random values, since zeros compute faster, and take less power.
    """
    size = _MATRIX[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) * 0.02 for _ in range(2))
    torch.mm(a, b)
    taken: list[float] = []
    total = 0.0
    while total < 2 * _WARM or len(taken) < 4 * _TRIALS:
        taken.append(seconds_of(lambda: torch.mm(a, b), device))
        total += taken[-1]
    flops = 2 * size**3
    return flops / min(taken[: 4 * _TRIALS]), flops / median(taken[len(taken) // 2 :])


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that all cores read from memory: the best of several trials, of several ways to read."""
    size = _BUFFER[device.type]
    buffer = torch.ones(size // 4, device=device)  # [values] float32
    rows = buffer.view(-1, 4096)
    vector = torch.ones(4096, device=device)
    ways: list[Callable[[], Any]] = [buffer.sum, buffer.amax, lambda: rows @ vector]
    return size / min(seconds_of(way, device) for _ in range(_TRIALS) for way in ways)


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """What the work takes, by the device's own clock where it has one: until all that was submitted is done."""
    if device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        work()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3
    start = perf_counter()
    work()
    return perf_counter() - start
