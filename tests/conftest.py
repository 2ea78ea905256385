"""Where there is no GPU, Triton's kernels are interpreted; Triton decides that when it is first imported."""

from __future__ import annotations

import os
import signal

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


# A shell starts what it runs in the background with Ctrl-C ignored, and processes that tests start would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith("test_kernels_"):
            item.add_marker(pytest.mark.kernels)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
