"""What `fastgraph env` reports: what is installed, what this machine can do, what is missing and how to get it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import pick_unit_and_suffix
from rich.text import Text

import fastgraph
from fastgraph.config import EngineConfig

Report = dict[str, Any]

# Distribution -> what it is for, and the command that brings it. Without a command it comes with fastgraph.
_REQUIRED = (
    "torch", "numpy", "safetensors", "huggingface-hub", "tokenizers", "jinja2", "typer", "rich", "prompt-toolkit",
)  # fmt: skip
_OPTIONAL = {
    "triton": ("compiled code and kernels on a GPU", "pip install 'fastgraph[cuda]'"),
    "flashinfer-python": ("a second prefill attention on a GPU", "pip install 'fastgraph[cuda]'"),
    "gguf": ("reading .gguf files, the default model's among them", "pip install 'fastgraph[gguf]'"),
}
_ON_GPU = ("triton", "flashinfer-python")

_COMPILER_COMMANDS = {
    "apt-get": "apt-get install g++",
    "dnf": "dnf install gcc-c++",
    "apk": "apk add g++",
    "pacman": "pacman -S gcc",
    "zypper": "zypper install gcc-c++",
    "xcode-select": "xcode-select --install",
}


def report() -> Report:
    """Everything there is to say, made of what JSON knows. `missing` lists what, what for and the command."""
    found: Report = {
        "fastgraph": fastgraph.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)},
        "cpp_compiler": _compiler(),
    }
    if found["packages"]["torch"] is not None:
        found |= _torch() | {"default_model": _default_model(), "caches": _caches()}
    found["missing"] = _missing(found)
    return found


def show(found: Report) -> None:
    """Print a report for people: in colour on a terminal, plain and unwrapped on a pipe."""
    console = Console(highlight=False, soft_wrap=True)

    def line(name: str, value: object) -> None:
        console.print(Text.assemble((f"{name:21}", "bold"), str(value)))

    line("fastgraph", found["fastgraph"])
    line("python", f"{found['python']}, {found['system']}")
    for name, number in found["packages"].items():
        line(name, number or "not installed")
    line("C++ compiler", found["cpp_compiler"] or "none found")
    if "device" in found:
        cpu = found["cpu"]
        line("CPU", f"{cpu['name']}, {cpu['cores']} cores, {_size(cpu['memory'])} memory")
        line("CPU can do", ", ".join([cpu["capability"], *cpu["features"]]))
        for gpu in found["gpus"]:
            free = f"{_size(gpu['memory_free'])} of {_size(gpu['memory'])} free"
            line("GPU", f"{gpu['name']}, compute capability {gpu['capability']}, {free}")
        if not found["gpus"]:
            line("GPU", f"none that torch can use ({found['torch_build']})")
        line("device", f"{found['device']}, {found['dtype']}, compile {found['compile']}")
        for name, implementation in found["kernels"].items():
            line(f"op {name}", implementation)
        if found["device"] == "cuda":
            line("FlashInfer", found["flashinfer"])
        line("default model", f"{found['default_model']['name']}: {found['default_model']['state']}")
        for name, cache in found["caches"].items():
            line(name, f"{cache['folder']} ({_size(cache['bytes'])})")
    console.print()
    if not found["missing"]:
        console.print("Nothing is missing.")
    for gap in found["missing"]:
        console.print(Text.assemble((f"missing: {gap['what']}", "yellow"), f", for {gap['for']}. {gap['command']}"))


def show_kernels(config: EngineConfig, explain: bool) -> None:
    """Print who serves each op of a model; with `explain`, every implementation, and why it serves or not."""
    from fastgraph.bench import with_shape
    from fastgraph.device.builder import dtype_name, settle_device, settle_dtype
    from fastgraph.kernels import registry
    from fastgraph.kernels.autotune import recall
    from fastgraph.kernels.probe import signature_of, typical
    from fastgraph.loading.checkpoint import open_checkpoint
    from fastgraph.terminal import Loading

    device = settle_device(config)
    dtype = settle_dtype(config, device)
    name = dtype_name(dtype)
    graphs = device.type == "cuda" and config.max_capture_bs != 0
    if config.model is None:
        signature, of = typical(device.type, name), "a model like Llama 3.1 8B"
        signature = replace(signature, page_size=config.page_size, graphs=graphs)
    else:
        with Loading() as loading:
            checkpoint = open_checkpoint(with_shape(replace(config, load_format="dummy")), name, loading.tell)
        signature = signature_of(checkpoint.config, device.type, dtype, config.page_size, graphs)
        of = checkpoint.name
    choices = recall(registry.choose(signature, config.kernels), signature)
    print(f"{of} on a {device.type}: {signature}")
    for op in registry.OPS.values():
        choice = choices.get(op.name)
        print(f"{op.name:18}{choice.who() if choice else 'compiled with the rest of the step: no choice here'}")
        if choice and explain:
            print(f"  {op.does}")
            for implementation, reason in choice.verdicts():
                print(f"    {implementation.name:14}{reason}")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _compiler() -> str | None:
    """The C++ compiler that torch.compile would take."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def _torch() -> Report:
    import torch

    from fastgraph.device.builder import dtype_name, settle_compile, settle_device, settle_dtype

    config = EngineConfig()
    device = settle_device(config)
    dtype = dtype_name(settle_dtype(config, device))
    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(number)
        capability = "{}.{}".format(*torch.cuda.get_device_capability(number))
        name = torch.cuda.get_device_name(number)
        gpus.append({"name": name, "capability": capability, "memory": total, "memory_free": free})
    probes = {"bfloat16": "_is_avx512_bf16_supported", "AMX": "_is_amx_tile_supported"}
    features = [name for name, probe in probes.items() if getattr(torch.cpu, probe, lambda: False)()]
    return {
        "torch_build": f"torch for CUDA {torch.version.cuda}" if torch.version.cuda else "torch without CUDA",
        "cpu": {
            "name": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "features": features,
        },
        "gpus": gpus,
        "device": device.type,
        "dtype": dtype,
        "compile": settle_compile(config, device),
        **_kernels(device.type, dtype),
    }


def _kernels(device: str, dtype: str) -> Report:
    """Which implementation of each op serves a common model on a device, and why FlashInfer's does or does not."""
    from fastgraph.kernels import registry
    from fastgraph.kernels.probe import typical

    choices = registry.choose(typical(device, dtype), {})
    verdicts = choices["prefill_attention"].verdicts()
    flashinfer = next(reason for implementation, reason in verdicts if implementation.name == "flashinfer")
    return {"kernels": {op: choice.who() for op, choice in choices.items()}, "flashinfer": flashinfer}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def _default_model() -> Report:
    from huggingface_hub import try_to_load_from_cache

    from fastgraph.loading.checkpoint import DEFAULT_HUB_ID, DEFAULT_NAME, DEFAULT_PACKAGE

    state = "not here"
    if importlib.util.find_spec(DEFAULT_PACKAGE) is not None:
        state = f"in the installed package {DEFAULT_PACKAGE}"
    elif isinstance(try_to_load_from_cache(DEFAULT_HUB_ID, "config.json"), str):
        state = "in the hub's cache"
    return {"name": DEFAULT_NAME, "installed": state != "not here", "state": state}


def _caches() -> Report:
    from huggingface_hub.constants import HF_HUB_CACHE

    from fastgraph.loading.files import cache_folder

    folders = {"cache": cache_folder(), "hub cache": Path(HF_HUB_CACHE)}
    return {name: {"folder": str(folder), "bytes": _bytes(folder)} for name, folder in folders.items()}


def _bytes(folder: Path) -> int:
    files = (Path(parent) / name for parent, _, names in os.walk(folder) for name in names)
    return sum(file.lstat().st_size for file in files)  # links of the hub's snapshots count as links


def _missing(found: Report) -> list[dict[str, str]]:
    gaps = []

    def miss(what: str, purpose: str, command: str) -> None:
        gaps.append({"what": what, "for": purpose, "command": command})

    for name in _REQUIRED:
        if found["packages"][name] is None:
            miss(name, "fastgraph itself", f"pip install {name}")
    on_gpu = found.get("device") == "cuda"
    for name, (purpose, command) in _OPTIONAL.items():
        if found["packages"][name] is None and (on_gpu or name not in _ON_GPU):
            miss(name, purpose, command)
    if "no nvcc" in found.get("flashinfer", ""):
        miss("nvcc", "building FlashInfer's kernels", "Install NVIDIA's CUDA toolkit, or set CUDA_HOME to where it is.")
    if found["cpp_compiler"] is None:
        commands = [command for tool, command in _COMPILER_COMMANDS.items() if shutil.which(tool)]
        miss("a C++ compiler", "--compile full or regional", commands[0] if commands else "Install g++ or clang++.")
    if "default_model" in found and not found["default_model"]["installed"]:
        from fastgraph.loading.checkpoint import DEFAULT_COMMAND

        miss(found["default_model"]["name"], "every command without --model", DEFAULT_COMMAND)
    return gaps


def _size(count: int) -> str:
    unit, name = pick_unit_and_suffix(count, ["bytes", "KiB", "MiB", "GiB"], 1024)
    return f"{count / unit:.1f} {name}"
