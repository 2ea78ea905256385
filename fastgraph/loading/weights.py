"""Reading safetensors folders and filling a model's parameters from them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fastgraph.errors import ModelError
from fastgraph.loading.files import INDEX, SINGLE, Progress, read_index

Names = Mapping[str, "str | tuple[str, ...] | list[str | tuple[str, ...]]"]  # parameter: the checkpoint's names for it

# What may stand before a checkpoint's name: how the tensor is stored.
PLUS_ONE = "1 +"  # less 1, as Gemma's norms are
MXFP4 = "mxfp4"  # [..., columns] in 4 bits, with a scale for every 32 of them
TRANSPOSED = "transposed"  # the last two dimensions the other way round
PAIRED = "paired"  # gates and ups by turns in dimension 1
EXPERT = "{expert}"  # in a checkpoint's name: the number of an expert, of those that one parameter holds
_TEXT_PART = "language_model."  # before the text part's names, in a model of text and images
_LISTED = 8  # names a message shows before it only counts


class WeightFiles:
    """The tensors of a checkpoint folder, memory-mapped. `names` maps the name of each to the file that holds it.

    An index file, where there is one, is the authority: what it does not name is not read. Of a model of text and
    images only the text part is here, under the names that a model of text alone would have. Raises `ModelError` for a
    folder without weights, and for files that are missing or cut off.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = read_index(folder)
        files = sorted(set(index.values())) or [_only_file(folder)]
        missing = [file for file in files if not (folder / file).is_file()]
        if missing:
            raise ModelError(
                f"{folder} lacks {len(missing)} of the weight files that {INDEX} names: {_listing(missing)}; "
                f"download them again"
            )
        held = {file: _opened(folder / file) for file in files}
        stored = {
            name: file
            for file in files
            for name in held[file].keys()  # noqa: SIM118 - no dict
            if not index or index.get(name) == file
        }
        self._prefix = _TEXT_PART if any(name.startswith(_TEXT_PART) for name in stored) else ""
        self.names: Mapping[str, Any] = {
            name.removeprefix(self._prefix): held[file]
            for name, file in stored.items()
            if name.startswith(self._prefix)
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self.names[name].get_slice(self._prefix + name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, in the checkpoint's dtype, backed by the mapped file."""
        tensor: torch.Tensor = self.names[name].get_tensor(self._prefix + name)
        return tensor


def _only_file(folder: Path) -> str:
    """The safetensors file of a folder without an index."""
    if (folder / SINGLE).is_file():
        return SINGLE
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        found = f"; it has {_listing(others)}, which would have to be converted to safetensors" if others else ""
        raise ModelError(f"{folder} holds no safetensors weights{found}")
    if len(files) > 1:
        raise ModelError(
            f"{folder} holds {len(files)} safetensors files but no {INDEX} that says which belong together; "
            f"add the index, or keep one file named {SINGLE}"
        )
    return files[0]


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a whole safetensors file ({error}); download it again") from error


def load_weights(
    model: torch.nn.Module,
    files: WeightFiles,
    names: Names,
    *,
    ignore: Sequence[str] = (),
    progress: Progress,
) -> None:
    """Fill every parameter of `model`, in place, from `files`.

    `names` maps parameter names to checkpoint names; a tuple of them lies one behind the other along dimension 0,
    and "{}" stands for the layer number. Names with "{expert}" are repeated for each expert in turn, of which a
    parameter [experts, rows, ...] holds what dimension 0 says. Words before a name tell how the checkpoint stores it:
    `PLUS_ONE` and those below it. A list holds alternatives: the first that the checkpoint knows counts. `ignore` holds
    shell patterns of checkpoint names that may be there but are not read. Each tensor goes from the mapped file to its
    place on the device, where it is cast to the parameter's dtype.

    Raises one `ModelError` that names every missing, unexpected and wrongly shaped tensor, before anything is read.
    """
    parameters = dict(model.named_parameters())
    sources = {name: sources_of(name, parameter, names, files.names) for name, parameter in parameters.items()}
    _check(parameters, sources, files, ignore)
    total = sum(p.numel() for p in parameters.values())
    done = 0
    with torch.no_grad():
        for name, parameter in parameters.items():
            row = 0
            for source in sources[name]:
                tensor = read(source, files.read, parameter)
                rows = tensor.shape[0] if tensor.ndim else 1
                whole = _as_filled(parameter, tensor.ndim)
                target = whole if len(sources[name]) == 1 else whole.narrow(0, row, rows)
                target.copy_(tensor)
                row += rows
            done += parameter.numel()
            progress("loading weights", done / total)


def fill_dummy(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill every parameter with random numbers: vectors (the norms' weights) around 1, all else around 0, spread 0.02.

    Never zeros: they would let kernels and caches off lightly, and hide NaNs. Drawn on the model's device.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.02, generator=generator)


def sources_of(name: str, parameter: torch.Tensor, names: Names, present: Container[str]) -> tuple[str, ...]:
    """Checkpoint names that make up a parameter. One that the map lacks is a fault in the model file.

    present: the names in the checkpoint, which decide between alternatives.
    """
    layer = re.search(r"(?<=\.)\d+(?=\.)", name)
    pattern = name if layer is None else f"{name[: layer.start()]}{{}}{name[layer.end() :]}"
    if pattern not in names:
        raise ModelError(f"the model file's weight names lack its parameter {pattern}")
    found = names[pattern]
    number = "" if layer is None else layer[0]

    def written_out(group: str | tuple[str, ...]) -> tuple[str, ...]:
        patterns = [each.replace("{}", number) for each in ((group,) if isinstance(group, str) else group)]
        experts = range(len(parameter) if EXPERT in patterns[0] else 1)
        return tuple(each.replace(EXPERT, str(expert)) for expert in experts for each in patterns)

    groups = [written_out(group) for group in (found if isinstance(found, list) else [found])]
    return next((group for group in groups if stored(group[0])[0] in present), groups[0])


def stored(source: str) -> tuple[str, ...]:
    """The checkpoint's tensors that make up one source of a parameter."""
    name = source.rpartition(" ")[2]
    return (f"{name}_blocks", f"{name}_scales") if MXFP4 in source else (name,)


def read(source: str, get: Callable[[str], torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
    """What a source's tensors mean to a parameter. `get` gives a tensor of the checkpoint by its name."""
    tensor, *scales = (get(name) for name in stored(source))
    if " " not in source:
        return tensor  # as it is, so that it goes straight to its place
    tensor = tensor.to(parameter.device)
    if scales:
        tensor = _from_mxfp4(tensor, scales[0].to(parameter.device))
    if TRANSPOSED in source:
        tensor = tensor.transpose(-1, -2)
    if PAIRED in source:
        tensor = torch.cat([tensor[:, 0::2], tensor[:, 1::2]], 1)
    return tensor.to(parameter.dtype) + 1 if PLUS_ONE in source else tensor


def _shape(source: str, files: WeightFiles) -> tuple[int, ...]:
    shape = files.shape(stored(source)[0])
    if MXFP4 in source:  # two numbers a byte
        shape = (*shape[:-2], 2 * shape[-2] * shape[-1])
    return (*shape[:-2], shape[-1], shape[-2]) if TRANSPOSED in source else shape


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below 0: E2M1


def _from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """OCP Microscaling Formats 1.0. Bytes [experts, rows, n, 16], the lower half of each first, and powers of two
    [experts, rows, n], raised by 127 -> [experts, rows, 32 * n] bfloat16, which holds them exactly."""
    numbers = torch.tensor([*_FP4, *(-x for x in _FP4)], device=blocks.device)
    experts = []
    for packed, power in zip(blocks, scales, strict=True):  # one by one: the indices are large
        halves = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)  # [rows, n, 32]
        experts.append(torch.ldexp(numbers[halves.int()], power.int()[..., None] - 127).flatten(-2).bfloat16())
    return torch.stack(experts)


def _check(
    parameters: Mapping[str, torch.Tensor],
    sources: Mapping[str, tuple[str, ...]],
    files: WeightFiles,
    ignore: Sequence[str],
) -> None:
    wanted = {name for group in sources.values() for source in group for name in stored(source)}
    present = wanted.intersection(files.names)
    missing = sorted(wanted - present)
    unexpected = sorted(
        n for n in files.names if n not in wanted and not any(fnmatch.fnmatchcase(n, p) for p in ignore)
    )
    shapes = []
    for name, parameter in parameters.items():
        group = sources[name]
        if not present.issuperset(name for source in group for name in stored(source)):
            continue
        have = [_shape(source, files) for source in group]
        want = tuple(_as_filled(parameter, len(have[0])).shape)
        whole = have[0] if len(have) == 1 else (sum(shape[0] for shape in have), *have[0][1:])
        if whole != want or any(shape[1:] != have[0][1:] for shape in have):
            found = _listing([str(list(shape)) for shape in have], " + ")
            shapes.append(f"{_listing(group, ' + ')}: {found}, the model needs {list(want)}")
    faults = [("missing", missing), ("unexpected", unexpected), ("of the wrong shape", shapes)]
    lines = [f"  {len(items)} {kind}: {_listing(items)}" for kind, items in faults if items]
    if lines:
        raise ModelError(
            f"the weights in {files.folder} do not fit the model that its config.json describes:\n" + "\n".join(lines)
        )


def _as_filled(parameter: torch.Tensor, dimensions: int) -> torch.Tensor:
    """A parameter as the checkpoint's tensors lie in it: experts whose matrices come singly, one behind the other."""
    return parameter.flatten(0, 1) if parameter.ndim == 3 and dimensions == 2 else parameter


def _listing(names: Sequence[str], between: str = ", ") -> str:
    more = f" … and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return between.join(names[:_LISTED]) + more
