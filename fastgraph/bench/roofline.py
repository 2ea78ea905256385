"""The least time that a step can take: the bytes it must read, over the bandwidth measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

from fastgraph import models

FORMULA = "roofline = least time of a decode step = (weights + context tokens of all requests * KV of one) / bandwidth"

_BUFFER = {"cpu": 2**29, "cuda": 2**32}  # bytes: far beyond any cache, and small beside the model
_TRIALS = 5


@dataclass(frozen=True, slots=True)
class Roofline:
    """Bytes that decoding must read, and how fast they can be read."""

    weights: int  # bytes that every step reads: all but an embedding that is only looked up
    kv_token: int  # bytes of keys and values for a token of context
    bandwidth: float  # bytes a second, the best seen

    def step_seconds(self, context: float) -> float:
        """The least time of a decode step. context: tokens of all its requests together."""
        return (self.weights + context * self.kv_token) / self.bandwidth

    def decode_seconds(self, lengths: Sequence[tuple[int, int]], slots: int) -> float:
        """The least time to decode requests of (prompt tokens, answer tokens), `slots` at a time, first come first.

        Prefill, which is bound by arithmetic, counts as nothing.
        """
        waiting, seconds = list(reversed(lengths)), 0.0
        running: list[tuple[int, int]] = []  # context, tokens to come
        while waiting or running:
            while waiting and len(running) < slots:
                prompt, answer = waiting.pop()
                if answer > 1:  # the first token is prefill's
                    running.append((prompt + 1, answer - 1))
            if running:
                seconds += self.step_seconds(sum(context for context, _ in running))
            running = [(context + 1, left - 1) for context, left in running if left > 1]
        return seconds


def measure(config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Roofline:
    """The roofline of a Hugging Face config's model on a device, its bandwidth measured now."""
    module = models.find(config)
    shape = module.Config.from_hf(config)
    with torch.device("meta"):
        model: nn.Module = module.Model(shape)
    read = sum(parameter.numel() for parameter in model.parameters())
    if not shape.tied:
        read -= sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Embedding))
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim
    return Roofline(read * dtype.itemsize, kv * dtype.itemsize, read_bandwidth(device))


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that all cores read from memory: the best of several trials, of several ways to read."""
    size = _BUFFER[device.type]
    buffer = torch.ones(size // 4, device=device)  # [values] float32
    rows = buffer.view(-1, 4096)
    vector = torch.ones(4096, device=device)
    ways: list[Callable[[], Any]] = [buffer.sum, buffer.amax, lambda: rows @ vector]
    return size / min(_seconds(way, device) for _ in range(_TRIALS) for way in ways)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - began
