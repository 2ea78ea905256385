"""FlashInfer's own kernels behind the prefill op, against the reference and over pages whose unwritten cells are NaN.

Building them takes minutes, so these run only where they have been built: fastgraph's first start on a GPU begins that.
"""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import DEVICE, gpu

from fastgraph.kernels import flashinfer_prefill, problems, registry
from fastgraph.kernels.registry import Signature

pytestmark = [pytest.mark.gpu, gpu]

KINDS = [(32, 8, 128, frozenset()), (32, 8, 128, frozenset({"rope"})), (9, 3, 64, frozenset({"rope", "window"}))]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "features"), KINDS)
def test_it_gives_what_the_reference_gives(heads: int, kv_heads: int, head_dim: int, features: frozenset[str]) -> None:
    pytest.importorskip("flashinfer")
    capability = torch.cuda.get_device_capability(DEVICE)
    asked = Signature("cuda", "bfloat16", heads, kv_heads, head_dim, 16, 1024, 32000, 2, features, capability)
    if reason := flashinfer_prefill.refuses(asked):
        pytest.skip(reason)
    kernel = registry.choose(asked, {"prefill_attention": "flashinfer"})["prefill_attention"].kernel()
    for rows in (2, 33, 300, 3000):
        assert problems.error(kernel, "prefill_attention", asked, rows) < problems.TOLERANCE["bfloat16"]
    assert problems.error(kernel, "decode_attention", asked, 100) < problems.TOLERANCE["bfloat16"]
