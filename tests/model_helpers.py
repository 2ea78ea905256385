"""A model file against transformers: tiny random models in float32, over a paged cache in every kind of step."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from paged import Paged, Piece, copy_weights
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import fastgraph
from fastgraph import models

TRAINED = 32  # positions; the sequences below are longer
PROMPT, ANSWER = 41, 30
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TRAINED,
    "initializer_range": 0.2,  # large enough for attention to look somewhere
}


@torch.no_grad()
def hf_model(config: Any) -> Any:
    """transformers' model with random weights, always the same ones."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():  # transformers starts norms at 1 and biases at 0
        if name.endswith("bias") or "norm" in name:
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def hf_raw(config: Any) -> dict[str, Any]:
    """The config.json that transformers would write."""
    return copy.deepcopy(config).to_dict() | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}


def load(config: Any, hf: Any) -> tuple[ModuleType, Any]:
    """The model file that runs a config, and its model with the weights of `hf`, of which none may be left over."""
    module = models.find(hf_raw(config))
    model = module.Model(module.Config.from_hf(hf_raw(config)))
    used = copy_weights(model, module.WEIGHTS, hf.state_dict())
    assert set(hf.state_dict()) - used == ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return module, model


@torch.no_grad()
def reference(config: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """transformers' logits: the prompt in one forward, then one token at a time. [tokens, vocab]"""
    hf = hf_model(config)  # a new one: its dynamic rope remembers the longest sequence it met
    cache = DynamicCache(config=hf.config)
    logits = [hf(torch.tensor([prompt]), past_key_values=cache).logits[0]]
    logits += [hf(torch.tensor([[token]]), past_key_values=cache).logits[0] for token in answer]
    return torch.cat(logits)


def tokens(seed: int, count: int) -> list[int]:
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_every_kind_of_step(config: Any) -> None:
    """Whole prompts, uneven chunks, rows of several lengths, decode rows beside prefill rows and padding rows."""
    module, model = load(config, hf_model(config))
    texts = {
        1: (tokens(1, PROMPT), tokens(2, ANSWER)),
        2: (tokens(3, 9), tokens(4, ANSWER)),
        3: (tokens(5, 35), [7, 8]),
    }
    want = {slot: reference(config, *text) for slot, text in texts.items()}
    paged = Paged(module.Config.from_hf(hf_raw(config)), slots=3, span=PROMPT + ANSWER, page_size=4)
    got: dict[int, list[Tensor]] = {slot: [] for slot in texts}

    def step(*counts: tuple[int, int]) -> None:
        pieces = []
        for slot, count in counts:
            prompt, answer = texts.get(slot, ([0], []))
            done = int(paged.lengths[slot])
            pieces.append(Piece(slot, (prompt + answer)[done : done + count], whole=len(prompt)))
        for piece, logits in zip(pieces, paged.step(model, pieces), strict=True):
            if piece.slot:
                got[piece.slot].append(logits)

    step((2, 9))  # a whole prompt
    step((1, 7), (2, 1))  # a first chunk with a decode row
    step((2, 1), (1, 1), (3, 35), (0, 1))  # a chunk of one token, another prompt, a padding row
    step((1, 20), (3, 1), (2, 1))
    step((3, 1), (1, 13))
    for _ in range(15):
        step((1, 1), (2, 1), (0, 1), (0, 1))  # decode with padding rows
    for _ in range(12):
        step((2, 1), (1, 1))
    for _ in range(3):
        step((1, 1))
    for slot, logits in got.items():
        done = torch.cat(logits)
        torch.testing.assert_close(done, want[slot][: len(done)], rtol=1e-4, atol=2e-5)
    assert len(torch.cat(got[1])) == PROMPT + ANSWER
    assert len(torch.cat(got[3])) == 37


def write_checkpoint(folder: Path, config: Any, **options: Any) -> None:
    """A tiny model as `save_pretrained` writes one, in shards, with a tokenizer that says numbers."""
    hf_model(config).save_pretrained(folder, max_shard_size="60KB", **options)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 80}))
    assert len(list(folder.glob("*.safetensors"))) > 1
    tokenizer = Tokenizer(WordLevel({str(i): i for i in range(SIZES["vocab_size"])}, unk_token="0"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def check_answers(folder: Path, config: Any, lengths: Sequence[int], margin: float = 0.0, **options: Any) -> None:
    """Greedy answers through the engine against transformers' logits. lengths: of the prompts.

    margin: by how much the logit of a token may be less than the largest.
    """
    prompts = [tokens(seed, length) for seed, length in enumerate(lengths)]
    small = {"max_decode_bs": 2, "page_size": 4, "max_step_tokens": 8, "max_model_len": 72, "dtype": "float32"}
    with fastgraph.load_model(str(folder), **{**small, **options}) as llm:
        answers = llm.generate(prompts, max_tokens=24, ignore_eos=True, logprobs=True, top_logprobs=20)
        assert llm.stats()["recompiles"] == 0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = reference(config, prompt, answer.token_ids)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() <= margin
        found = torch.tensor([list(token.top.values()) for token in answer.logprobs])
        torch.testing.assert_close(found, logits.log_softmax(-1).topk(20).values, rtol=1e-4, atol=1e-4 + margin)


def check_answers_on_gpu(folder: Path, config: Any, rows: int) -> None:
    """In every kind of step: prompts come in chunks, some longer than the window or the trained length of a test."""
    write_checkpoint(folder, config)
    lengths = [1 + 13 * i % 41 for i in range(rows)]
    limits = {"max_decode_bs": rows, "max_step_tokens": 32, "kv_pages": 400, "page_size": 16}
    check_answers(folder, config, lengths, margin=1e-3, device="cuda", **limits)


def numberless(name: str) -> str:
    """A parameter's or module's name with "{}" for the layer's number."""
    return ".".join("{}" if part.isdigit() else part for part in name.split("."))


def check_declarations(*configs: Any) -> None:
    """All weight names are used by one of the configs; the tensor-parallel plan names every linear once."""
    module = models.find(hf_raw(configs[0]))
    made = [module.Model(module.Config.from_hf(hf_raw(config))) for config in configs]
    assert {numberless(name) for model in made for name, _ in model.named_parameters()} == set(module.WEIGHTS)
    linears = {
        numberless(name)
        for model in made
        for name, part in [*model.named_modules(), *model.named_parameters()]
        if (part.ndim == 3 if isinstance(part, Tensor) else isinstance(part, nn.Linear) and "router" not in name)
    }
    assert linears == set(module.TENSOR_PARALLEL)
    assert set(module.TENSOR_PARALLEL.values()) == {"column", "row"}
