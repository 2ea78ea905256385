"""The one way from the host's numpy to the device."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.control.plan import Int32


def upload(array: Int32, device: torch.device) -> Tensor:
    """The array as a tensor on the device, of the same shape. On a CPU they share memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # Pinned, so that the copy does not wait for the steps in flight; torch keeps the buffer until it is done.
    return tensor.pin_memory().to(device, non_blocking=True)
