"""A whole model on the GPU's kernels, through the op's own choices, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_helpers import DEVICE, load
from paged import Paged, Piece, copy_weights, forward
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from fastgraph import models, ops
from fastgraph.kernels import cuda, registry, serving

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


VARIANTS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied and biased": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(**SIZES),
    "qwen2, windowed": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=13, max_window_layers=1),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=13, layer_types=["sliding_attention", "full_attention"]),
    "phi3, a part of each odd head turned": Phi3Config(
        **SIZES | {"head_dim": 12}, partial_rotary_factor=0.5, pad_token_id=0
    ),
}


@pytest.fixture(autouse=True)
def on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a GPU's tensors wherever they are."""
    load("linear")  # skips where there is no Triton
    kernels = {i.op: i.load() for op in registry.OPS for i in registry.implementations(op) if i.name == "triton"}
    monkeypatch.setattr(serving, "kernels", lambda device: kernels)
    monkeypatch.setattr(ops, "_has_kernels", lambda x: True)
    monkeypatch.setattr(cuda, "linear", cuda._linear)
    monkeypatch.setattr(cuda, "add_linear", cuda._add_linear)
    monkeypatch.setattr(cuda, "norm_add", cuda._norm_add)
    monkeypatch.setattr(cuda, "route", cuda._route)


def build(config: PretrainedConfig) -> tuple[Any, Any, Any]:
    """transformers' model of a config, ours with the same weights, and our config."""
    torch.manual_seed(2)
    config._attn_implementation = "eager"
    reference = AutoModelForCausalLM.from_config(config).eval().to(DEVICE)
    raw = config.to_dict() | {"architectures": [type(reference).__name__]}
    module = models.find(raw)
    shape = module.Config.from_hf(raw)
    model = module.Model(shape)
    copy_weights(model, module.WEIGHTS, reference.state_dict())
    return reference, model.to(DEVICE), shape


SLOW = (
    "qwen2, windowed",
    "phi3, a part of each odd head turned",
)  # interpreted, and nothing in them is new to a kernel


@pytest.mark.parametrize("variant", [pytest.param(v, marks=pytest.mark.gpu) if v in SLOW else v for v in VARIANTS])
@torch.no_grad()
def test_prefill_chunks_and_decode_give_the_logits_of_transformers(variant: str) -> None:
    reference, model, shape = build(VARIANTS[variant])
    first, second, third = torch.randint(0, 96, (3, 40)).tolist()
    want = reference(torch.tensor([first, second, third], device=DEVICE)).logits  # [3, 40, vocab]
    width = ops.cache_width(shape.head_dim, "cuda")
    paged = Paged(shape, slots=3, span=40, page_size=16, width=width, device=DEVICE)
    done = {1: 0, 2: 0, 3: 0}
    steps = [
        [Piece(1, first[:16], whole=37)],
        [Piece(1, first[16:37], whole=37), Piece(3, third[:1], whole=1)],
        [Piece(3, third[1:2]), Piece(2, second[:35], whole=35)],
        [Piece(3, third[2:3])],  # one row
        [Piece(1, first[37:38]), Piece(3, third[3:4]), Piece(2, second[35:36])],  # decode alone: no padding
        [Piece(1, first[38:39]), Piece(0, [0]), Piece(3, third[4:5]), Piece(0, [0]), Piece(2, second[36:37])],
        [Piece(2, second[37:38]), Piece(1, first[39:40])],
    ]
    for pieces in steps:
        for piece, got in zip(pieces, paged.step(model, pieces), strict=True):
            if piece.slot == 0:
                continue
            start = done[piece.slot]
            done[piece.slot] += len(piece.ids)
            torch.testing.assert_close(got, want[piece.slot - 1, start : done[piece.slot]], rtol=2e-3, atol=2e-3)


@pytest.fixture
def nan_where_nobody_wrote() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills new memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)],
    ids=["llama", "mixtral"],
)
@pytest.mark.parametrize(("unowned", "empty"), [(7, 4), (0, 2)])
@pytest.mark.usefixtures("nan_where_nobody_wrote")
@torch.no_grad()
def test_what_a_captured_step_is_padded_with_changes_no_logit(
    config: PretrainedConfig, unowned: int, empty: int
) -> None:
    """Attention leaves tokens that belong to no row unwritten, and so they are anything from there on."""
    _, model, shape = build(config)
    ids = torch.randint(0, 96, (3, 12)).tolist()
    plain, padded = (Paged(shape, slots=3, span=20, page_size=16, device=DEVICE) for _ in "ab")
    nobody = torch.zeros(max(unowned, empty), dtype=torch.int32, device=DEVICE)

    def run(model: Any, batch: ops.Batch, caches: list[ops.LayerCache]) -> torch.Tensor:
        tokens = {name: getattr(batch, name) for name in ("ids", "positions", "sequence_lengths", "token_slots")}
        x = forward(
            model,
            batch._replace(
                **{name: torch.cat([x, nobody[:unowned]]) for name, x in tokens.items()},
                slots=torch.cat([batch.slots, nobody[:empty]]),
                query_start=torch.cat([batch.query_start, batch.query_start[-1:].expand(empty)]),
            ),
            caches,
        )
        live = len(batch.ids)
        assert x[live:].isnan().all()
        return x[:live]

    for pieces in (
        [Piece(1, ids[0][:9], whole=9), Piece(2, ids[1][:1], whole=1)],
        [Piece(2, ids[1][1:2]), Piece(1, ids[0][9:10]), Piece(3, ids[2][:5], whole=5)],
    ):
        for got, want in zip(padded.step(model, pieces, run), plain.step(model, pieces), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
