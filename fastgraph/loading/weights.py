"""Reading safetensors folders and filling a model's parameters from them."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fastgraph.errors import ModelError

Progress = Callable[[str, "float | None"], None]  # the phase in words, and the share of it that is done (0..1)

INDEX = "model.safetensors.index.json"
PLUS_ONE = "1 + "  # before a checkpoint's name: Gemma's norms are stored less 1
_LISTED = 8  # names a message shows before it only counts


class WeightFiles:
    """The tensors of a checkpoint folder, memory-mapped; a file is opened when its first tensor is asked for.

    `names` maps each tensor's name to the file that holds it. An index file, where there is one, is the authority:
    other safetensors beside it are not read. Raises `ModelError` for a folder without weights and for missing shards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self.names: Mapping[str, str] = self._index()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._file(self.names[name]).get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, in the checkpoint's dtype, backed by the mapped file."""
        tensor: torch.Tensor = self._file(self.names[name]).get_tensor(name)
        return tensor

    def _index(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise ModelError(f"{index} is not an index of safetensors files; download it again") from error
            missing = sorted({file for file in names.values() if not (self.folder / file).is_file()})
            if missing:
                raise ModelError(
                    f"{self.folder} lacks {len(missing)} of the weight files that {INDEX} names: "
                    f"{_listing(missing)}; download them again"
                )
            return dict(names)
        files = sorted(self.folder.glob("*.safetensors"))
        if (self.folder / "model.safetensors").is_file():
            files = [self.folder / "model.safetensors"]
        if not files:
            others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in self.folder.glob(pattern))
            found = f"; it has {_listing(others)}, which would have to be converted to safetensors" if others else ""
            raise ModelError(f"{self.folder} holds no safetensors weights{found}")
        if len(files) > 1:
            raise ModelError(
                f"{self.folder} holds {len(files)} safetensors files but no {INDEX} that says which belong together; "
                f"add the index, or keep one file named model.safetensors"
            )
        return dict.fromkeys(self._file(files[0].name).keys(), files[0].name)

    def _file(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{self.folder / file} is not a whole safetensors file ({error}); download it again"
                ) from error
        return self._open[file]


def load_weights(
    model: torch.nn.Module,
    files: WeightFiles,
    names: Mapping[str, str | tuple[str, ...]],
    *,
    ignore: Sequence[str] = (),
    progress: Progress,
) -> None:
    """Fill every parameter of `model`, in place, from `files`.

    `names` maps parameter names to checkpoint names; a tuple of them lies one behind the other along dimension 0,
    "{}" stands for the layer number, and "1 + name" is what the checkpoint holds, plus one. `ignore` holds shell
    patterns of checkpoint names that may be there but are not read. Each tensor goes from the mapped file to its place
    on the device, where it is cast to the parameter's dtype.

    Raises one `ModelError` that names every missing, unexpected and wrongly shaped tensor, before anything is read.
    """
    parameters = dict(model.named_parameters())
    sources = {name: _sources(name, names) for name in parameters}
    _check(parameters, sources, files, ignore)
    total = sum(p.numel() for p in parameters.values())
    done = 0
    with torch.no_grad():
        for name, parameter in parameters.items():
            row = 0
            for source in sources[name]:
                tensor = files.read(source.removeprefix(PLUS_ONE))
                rows = tensor.shape[0] if tensor.ndim else 1
                target = parameter if len(sources[name]) == 1 else parameter.narrow(0, row, rows)
                target.copy_(tensor)
                if source.startswith(PLUS_ONE):
                    target += 1
                row += rows
            done += parameter.numel()
            progress("loading weights", done / total)


def fill_dummy(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill every parameter with random numbers: vectors (the norms' weights) around 1, all else around 0, spread 0.02.

    Never zeros: they would let kernels and caches off lightly, and hide NaNs. Drawn on each parameter's own device.
    """
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.02, generator=generators[device])


def _sources(parameter: str, names: Mapping[str, str | tuple[str, ...]]) -> tuple[str, ...]:
    """Checkpoint names that make up a parameter. One that the map lacks is a fault in the model file."""
    layer = re.search(r"(?<=\.)\d+(?=\.)", parameter)
    pattern = parameter if layer is None else f"{parameter[: layer.start()]}{{}}{parameter[layer.end() :]}"
    if pattern not in names:
        raise ModelError(f"the model file's weight names lack its parameter {pattern}")
    found = names[pattern]
    number = "" if layer is None else layer[0]
    return tuple(name.replace("{}", number) for name in ((found,) if isinstance(found, str) else found))


def _check(
    parameters: Mapping[str, torch.Tensor],
    sources: Mapping[str, tuple[str, ...]],
    files: WeightFiles,
    ignore: Sequence[str],
) -> None:
    sources = {name: tuple(source.removeprefix(PLUS_ONE) for source in group) for name, group in sources.items()}
    wanted = {source for group in sources.values() for source in group}
    present = {name for name in files.names if name in wanted and _readable(files, name)}
    missing = sorted(wanted - present)
    unexpected = sorted(
        n for n in files.names if n not in wanted and not any(fnmatch.fnmatchcase(n, p) for p in ignore)
    )
    shapes = []
    for name, parameter in parameters.items():
        group = sources[name]
        if not present.issuperset(group):
            continue
        have = [files.shape(source) for source in group]
        want = tuple(parameter.shape)
        whole = have[0] if len(have) == 1 else (sum(shape[0] for shape in have), *have[0][1:])
        if whole != want or any(shape[1:] != have[0][1:] for shape in have):
            shapes.append(f"{' + '.join(group)}: {' + '.join(map(str, map(list, have)))}, the model needs {list(want)}")
    faults = [("missing", missing), ("unexpected", unexpected), ("of the wrong shape", shapes)]
    lines = [f"  {len(items)} {kind}: {_listing(items)}" for kind, items in faults if items]
    if lines:
        raise ModelError(
            f"the weights in {files.folder} do not fit the model that its config.json describes:\n" + "\n".join(lines)
        )


def _readable(files: WeightFiles, name: str) -> bool:
    """Whether the file that the index names for a tensor really holds it."""
    with contextlib.suppress(SafetensorError):
        files.shape(name)
        return True
    return False


def _listing(names: Sequence[str]) -> str:
    more = f" … and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
