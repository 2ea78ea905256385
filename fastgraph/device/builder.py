"""From a config to a device that is ready to serve: model, weights, KV pool, slots, compiled step."""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from fastgraph import compile_cache, models
from fastgraph.config import EngineConfig
from fastgraph.control.plan import Limits
from fastgraph.device.compiler import CompiledStep, Mode
from fastgraph.device.executor import Executor
from fastgraph.device.handle import DeviceHandle
from fastgraph.device.metadata import StepMetadata
from fastgraph.device.slots import TABLE_WIDTH, Slots
from fastgraph.errors import ConfigError
from fastgraph.kernels import registry, serving
from fastgraph.kernels.autotune import tune
from fastgraph.kernels.probe import signature_of
from fastgraph.loading.checkpoint import Checkpoint
from fastgraph.loading.files import Progress
from fastgraph.loading.weights import WeightFiles, fill_dummy, load_weights
from fastgraph.ops import LayerCache, cache_width
from fastgraph.rope import Rope

# What a machine is given where the user leaves it open.
DEFAULT_DECODE_BS = {"cpu": 32, "cuda": 256}
DEFAULT_STEP_TOKENS = {"cpu": 512, "cuda": 8192}
HOST_KV_GB = {"cpu": 0.0, "cuda": 4.0}  # pages that are pushed out of a CPU's memory would go to the same memory
CPU_SHARE = 0.25  # of all memory, for keys and values: others use it too
GPU_HEADROOM = 0.02  # of all memory, left free: allocations of unlike sizes leave gaps


def settle_device(config: EngineConfig) -> torch.device:
    """The device to run on. Raises `ConfigError` if the one asked for is not there."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device cuda was asked for, but torch finds no CUDA GPU; `fastgraph env` says more")
    return torch.device("cuda" if config.device != "cpu" and available else "cpu")


def settle_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """bfloat16 where the machine multiplies it natively, float32 elsewhere, unless one is asked for."""
    if config.dtype != "auto":
        named: torch.dtype = getattr(torch, config.dtype)
        return named
    native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """As options and config files write it."""
    return str(dtype).removeprefix("torch.")


def settle_compile(config: EngineConfig, device: torch.device) -> Mode:
    """How the step is compiled: on a CPU not at all unless asked for, since a first answer should not wait for it."""
    if config.compile != "auto":
        return config.compile
    return "off" if device.type == "cpu" else "regional"


def settle_depth(config: EngineConfig, device: torch.device) -> int:
    """Steps in flight beside the newest. A CPU runs a step while it is submitted, so there is nothing to gain."""
    if config.in_flight_depth is not None:
        return config.in_flight_depth
    return 0 if device.type == "cpu" else 2


def settle_multi_step(config: EngineConfig, device: torch.device) -> int:
    """Decode steps that may be submitted together. A CPU's steps are long."""
    return config.multi_step or (1 if device.type == "cpu" else 8)


def settle_step_tokens(config: EngineConfig, device: torch.device, slots: int) -> int:
    """Tokens that a step may compute. By default a page of a prompt fits beside a full batch."""
    return config.max_step_tokens or max(DEFAULT_STEP_TOKENS[device.type], slots + config.page_size)


def build_device(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, vocab: int | None, progress: Progress
) -> DeviceHandle:
    """Build what executes steps of the checkpoint's model. Call it in the thread that will serve.

    vocab: ids that the tokenizer knows; the embedding's padding above them is never sampled. None: all of them.
    Raises `ConfigError` for what cannot be, or does not fit into memory.
    """
    try:
        return _build(config, checkpoint, device, vocab, progress)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"there is not enough memory ({str(error).splitlines()[0]}): take a smaller model or dtype, or less of "
            f"max_decode_bs, max_model_len, max_step_tokens, page_size or kv_pages"
        ) from error


def _build(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, vocab: int | None, progress: Progress
) -> DeviceHandle:
    if device.type == "cpu" and (config.max_capture_bs or config.max_capture_tokens):
        raise ConfigError("max_capture_bs and max_capture_tokens are of CUDA graphs, and this is a CPU")
    dtype = settle_dtype(config, device)
    module = models.find(checkpoint.config)
    shape = module.Config.from_hf(checkpoint.config)
    model = _load(config, checkpoint, module, shape, device, dtype, progress)
    limits = _limits(config, shape, min(vocab or shape.vocab, shape.vocab), device)
    slots = Slots(limits, shape.vocab, device)
    mode = settle_compile(config, device)
    if mode != "off":
        compile_cache.activate()
    top = _capture_top(config, limits) if device.type == "cuda" else 0
    signature = signature_of(checkpoint.config, device.type, dtype, limits.page_size, graphs=top > 0)
    choices = registry.choose(signature, config.kernels)
    if config.autotune:
        choices = tune(choices, signature, limits.slots, limits.max_step_tokens, progress)
    registry.build_missing(choices, signature)
    serving.serve(device.type, registry.load(choices))
    step = CompiledStep(model, _caches(0, limits, shape, device, dtype), slots.state, limits.vocab, mode)
    depth = settle_depth(config, device)
    executor = Executor(step, slots, StepMetadata(limits, device), top, device, depth)
    progress("warming up" if mode == "off" else f"compiling ({mode})", None)
    executor.warm_up()
    progress("reserving memory for keys and values", None)
    taken = 0
    if device.type == "cuda":
        most = _capturable_tokens(choices["prefill_attention"], limits.max_step_tokens)
        taken = executor.reserve(limits, config.max_capture_tokens, most)
    width = cache_width(shape.head_dim, device.type)
    page_bytes = shape.layers * 2 * limits.page_size * shape.kv_heads * width * dtype.itemsize
    limits = _fit_pages(config, limits, taken, page_bytes, device)
    # Where a key depends on what comes after it, a prompt's pages are of no use to another.
    ropes = [module for module in model.modules() if isinstance(module, Rope)]
    shared = config.prefix_cache and not any(rope.looks_ahead(limits.max_model_len) for rope in ropes)
    limits = replace(limits, prefix_cache=shared)
    step.caches = _caches(limits.pages, limits, shape, device, dtype)
    if device.type == "cuda":
        executor.rehearse(limits)
        executor.capture(progress)
    return DeviceHandle(limits, executor, step)


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    module: ModuleType,
    shape: Any,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):  # shapes alone: the memory comes once, on the right device, without initialising it
            model = module.Model(shape)
    finally:
        torch.set_default_dtype(before)
    model.to_empty(device=device)
    model.requires_grad_(False).eval()
    if config.load_format == "dummy":
        progress("filling the model with random weights", None)
        fill_dummy(model)
    else:
        harmless = ["*.rotary_emb.inv_freq", *(["lm_head.weight"] if shape.tied else [])]
        load_weights(model, WeightFiles(checkpoint.folder), module.WEIGHTS, ignore=harmless, progress=progress)
    return model


def _limits(config: EngineConfig, shape: Any, vocab: int, device: torch.device) -> Limits:
    """What was asked for, with as many pages as all slots could ever use."""
    size = config.page_size
    slots = config.max_decode_bs or DEFAULT_DECODE_BS[device.type]
    asked = config.max_model_len or shape.max_positions
    if asked > shape.max_positions:
        raise ConfigError(f"max_model_len {asked} is above what the model was made for, {shape.max_positions} tokens")
    step_tokens = settle_step_tokens(config, device, slots)
    if step_tokens < slots + size:
        raise ConfigError(
            f"max_step_tokens must be at least max_decode_bs + page_size = {slots + size}, so that a prompt can move "
            f"on beside a full batch; it is {step_tokens}"
        )
    tables = slots * (4 * asked + 3 * vocab)  # bytes, of the scheduler's tokens and of the sampler's counts
    if tables > _host_memory():
        raise ConfigError(
            f"max_decode_bs {slots} takes {tables / 1e9:.0f} GB for what is known of each request: more than this "
            f"machine has"
        )
    if (slots + 1) * (-(-asked // size) + TABLE_WIDTH) >= 2**31:  # a place in the slots' tables is an int32
        raise ConfigError(
            f"max_decode_bs {slots} times max_model_len {asked} is more than page tables can hold with page_size "
            f"{size}: ask for less of them, or for larger pages"
        )
    window = getattr(shape, "lookback", 0)  # which the models have whose layers all look back the same window
    pages, together = slots * -(-asked // size), settle_multi_step(config, device)
    return Limits(slots, pages, size, asked, step_tokens, vocab, window=window, multi_step=together)


def _fit_pages(config: EngineConfig, limits: Limits, taken: int, page_bytes: int, device: torch.device) -> Limits:
    """The limits with as many pages as there is memory for, if the user has not said how many.

    taken: bytes of a GPU that steps and graphs will take of what is free now.
    """
    pages = config.kv_pages
    if pages is not None and device.type == "cpu" and pages * page_bytes > _host_memory():
        raise ConfigError(f"{pages} kv_pages take {pages * page_bytes / 1e9:.1f} GB: more than this machine has")
    if pages is None:
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            memory = free - taken - int(total * GPU_HEADROOM)
        else:
            memory = int(_host_memory() * CPU_SHARE)
        pages = min(max(memory, 0) // page_bytes - 1, limits.pages)  # page 0 is the null page
    # A request may never be longer than the pool; its last token's KV is never written.
    max_model_len = min(limits.max_model_len, pages * limits.page_size + 1)
    if max_model_len < 2:
        raise ConfigError("there is no memory left for keys and values: ask for a smaller model or dtype, or kv_pages")
    if config.max_model_len and max_model_len < config.max_model_len:
        needed = -(-(config.max_model_len - 1) // limits.page_size)
        more = f"{needed} kv_pages" if config.kv_pages else "a smaller model"
        raise ConfigError(
            f"max_model_len {config.max_model_len} does not fit: {pages} pages are there, for {max_model_len} tokens "
            f"at most. Ask for less of it, or for {more}"
        )
    if config.host_kv_gb is not None and config.host_kv_gb * 1e9 > _host_memory():
        raise ConfigError(f"host_kv_gb {config.host_kv_gb:g} is more than this machine has, {_host_memory() / 1e9:.0f}")
    host_gb = HOST_KV_GB[device.type] if config.host_kv_gb is None else config.host_kv_gb
    return replace(limits, pages=pages, max_model_len=max_model_len, host_pages=int(host_gb * 1e9) // page_bytes)


def _host_memory() -> int:
    """Bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _capturable_tokens(choice: registry.Choice, most: int) -> int:
    """Of `most` tokens, up to how many a step may have for graphs to record whatever serves it."""
    captured = 0
    for rows, implementation in choice.parts():
        if not implementation.capturable:
            return captured
        captured = most if rows is None else rows
    return captured


def _capture_top(config: EngineConfig, limits: Limits) -> int:
    top = limits.slots if config.max_capture_bs is None else config.max_capture_bs
    if top > limits.slots:
        raise ConfigError(f"max_capture_bs {top} is above max_decode_bs {limits.slots}, so part of it is never used")
    return top


def _caches(pages: int, limits: Limits, shape: Any, device: torch.device, dtype: torch.dtype) -> list[LayerCache]:
    width = cache_width(shape.head_dim, device.type)
    size = (pages + 1, limits.page_size, shape.kv_heads, width)  # page 0 is the null page
    return [
        LayerCache(torch.empty(size, dtype=dtype, device=device), torch.empty(size, dtype=dtype, device=device))
        for _ in range(shape.layers)
    ]
