"""Every implementation that comes with fastgraph, called as an op calls it, against the reference."""

from __future__ import annotations

import pytest
from kernel_helpers import DEVICE, DTYPE, HAS_GPU, load

from fastgraph.kernels import problems, registry
from fastgraph.kernels.registry import Signature

load("linear")  # skips where there is no Triton

FEATURES = [frozenset(), frozenset({"rope"}), frozenset({"rope", "norms", "window"})]
ROWS = (1, 33, 300, 2500) if HAS_GPU else (1, 9)
OPS = list(registry.OPS)


@pytest.mark.parametrize("features", FEATURES, ids=lambda features: " ".join(sorted(features)) or "plain")
@pytest.mark.parametrize("op", OPS)
def test_it_gives_what_the_reference_gives(op: str, features: frozenset[str]) -> None:
    sizes = (32, 8, 128, 16, 1024, 32000, 2) if HAS_GPU else (4, 2, 16, 8, 32, 50, 2)
    signature = Signature(DEVICE.type, str(DTYPE).removeprefix("torch."), *sizes, features, (9, 0))
    for implementation in registry.implementations(op):
        if implementation.name != "reference" and not implementation.refuses(signature):
            for rows in ROWS:
                far = problems.error(implementation.load(), op, signature, rows)
                assert far <= problems.TOLERANCE[signature.dtype], (implementation.name, rows)
