"""Who serves an op: what is filtered, how the rest is ranked, what can be forced, and what people are told."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastgraph.cli import app
from fastgraph.config import EngineConfig
from fastgraph.errors import ConfigError, FastgraphWarning
from fastgraph.kernels import probe, registry, serving
from fastgraph.kernels.probe import signature_of
from fastgraph.kernels.registry import Choice, Implementation, Signature

SIZES: dict[str, Any] = {
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
    "page_size": 16,
    "hidden": 512,
    "vocab": 1000,
    "layers": 2,
}


def signature(device: str = "cpu", dtype: str = "float32", **changes: Any) -> Signature:
    return Signature(**{"device": device, "dtype": dtype, **SIZES, **changes})


def hopper(**changes: Any) -> Signature:
    return signature(**{"device": "cuda", "dtype": "bfloat16", "capability": (9, 0), "graphs": True, **changes})


def kernel(name: str, **options: Any) -> Implementation:
    return Implementation("prefill_attention", name, lambda: lambda q: name, **options)


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Register what a test offers, and forget it afterwards."""
    registry.implementations("sample")
    known = dict(registry._registered)
    yield registry.register
    registry._registered.clear()
    registry._registered.update(known)


def names(choice: Choice) -> list[str]:
    return [implementation.name for implementation in choice.candidates]


def reason(choice: Choice, name: str) -> str:
    return next(text for implementation, text in choice.verdicts() if implementation.name == name)


@pytest.mark.parametrize("wrong", [{"heads": 9}, {"head_dim": 0}, {"dtype": "int8"}, {"features": frozenset({"x"})}])
def test_a_signature_that_cannot_be_is_refused_when_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no kernel takes"):
        signature(**wrong)


def test_triton_serves_a_gpu_and_the_reference_a_cpu() -> None:
    pytest.importorskip("triton")
    assert {choice.who() for choice in registry.choose(hopper(), {}).values()} == {"triton"}
    on_cpu = registry.choose(signature(), {})
    assert {choice.who() for choice in on_cpu.values()} == {"reference"}
    assert "linear" not in on_cpu  # the compiler fuses it there


@pytest.mark.parametrize(
    ("options", "asked", "told"),
    [
        ({"devices": ("cuda",)}, signature(), "runs on cuda"),
        ({"capability": (10, 0)}, hopper(), "needs compute capability 10.0"),
        ({"packages": ("no_such_module",)}, signature(), "needs no_such_module, not installed here"),
        ({"dtypes": ("bfloat16",)}, signature(), "takes bfloat16"),
        ({"features": frozenset({"rope"})}, signature(features=frozenset({"rope", "window"})), "lacks window"),
        ({"refuses": lambda s: f"page_size {s.page_size} is odd"}, signature(page_size=3), "page_size 3 is odd"),
    ],
)
def test_what_does_not_fit_is_left_out_with_the_reason(
    options: dict[str, Any], asked: Signature, told: str, offers: Any
) -> None:
    offers(kernel("mine", rank=99, **options))
    choice = registry.choose(asked, {})["prefill_attention"]
    assert "mine" not in names(choice)
    assert reason(choice, "mine") == told
    with pytest.raises(ConfigError, match=f"prefill_attention cannot be forced; mine: {told}"):
        registry.choose(asked, {"prefill_attention": "mine"})


def test_what_reads_on_the_host_serves_no_op_that_graphs_record() -> None:
    choices = registry.choose(hopper(), {})
    assert "CUDA graph" in reason(choices["decode_attention"], "reference")
    assert "reference" in names(choices["prefill_attention"])
    slow = {"decode_attention": "reference"}  # to look for a fault: without graphs it can
    assert registry.choose(hopper(graphs=False), slow)["decode_attention"].who() == "reference"


def test_triton_says_what_it_cannot_take() -> None:
    with pytest.raises(ConfigError, match=r"nothing computes decode_attention.*head_dim 96 is no power of two"):
        registry.choose(hopper(head_dim=96), {})


def test_the_highest_rank_serves_and_installing_a_package_alone_changes_nothing(offers: Any) -> None:
    offers(kernel("installed"))
    assert registry.choose(signature(), {})["prefill_attention"].who() == "reference"
    offers(kernel("better", rank=20))
    choice = registry.choose(signature(), {})["prefill_attention"]
    assert choice.who() == "better"
    assert names(choice) == ["better", "reference", "installed"]
    assert reason(choice, "better") == "serves: the highest rank that fits"
    assert reason(choice, "installed") == "fits, but has rank 0"


def test_a_forced_kernel_serves_alone(offers: Any) -> None:
    offers(kernel("mine", rank=-5))
    choice = registry.choose(signature(), {"prefill_attention": "mine"})["prefill_attention"]
    assert (choice.who(), names(choice)) == ("mine", ["mine"])
    assert reason(choice, "mine") == "serves: forced"


def test_unknown_ops_and_names_are_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"no op attend .*ops are: decode_attention, prefill_attention"):
        registry.choose(signature(), {"attend": "triton"})
    with pytest.raises(ConfigError, match="sample has no kernel fast; it has triton, reference"):
        registry.choose(signature(), {"sample": "fast"})
    with pytest.raises(ConfigError, match="no op linear to choose a kernel for on a cpu"):
        registry.choose(signature(), {"linear": "triton"})
    with pytest.raises(ConfigError, match="there is no op attend"):
        registry.register(Implementation("attend", "mine", lambda: print))


def test_implementations_share_an_op_by_the_number_of_rows(offers: Any) -> None:
    offers(kernel("few", rank=30, max_rows=4))
    offers(kernel("some", rank=20, max_rows=64))
    offers(kernel("many", rank=15))
    choice = registry.choose(signature(), {})["prefill_attention"]
    assert choice.who() == "few up to 4 rows, some up to 64 rows, many"
    run = choice.kernel()
    assert [run(torch.empty(rows)) for rows in (1, 4, 5, 64, 65, 9000)] == [
        "few",
        "few",
        "some",
        "some",
        "many",
        "many",
    ]
    forced = registry.choose(signature(), {"prefill_attention": "some"})["prefill_attention"]
    assert forced.kernel()(torch.empty(2)) == "some"
    assert forced.kernel()(torch.empty(100)) == "many"


def test_what_was_measured_serves_where_it_was_faster(offers: Any) -> None:
    offers(kernel("few", rank=30, max_rows=64))
    offers(kernel("other"))
    candidates = registry.choose(signature(), {})["prefill_attention"].candidates
    for fastest, who in (
        ({1: "other", 8: "few", 64: "few", 512: "reference"}, "other up to 1 rows, few up to 64 rows, reference"),
        ({1: "other", 8: "other"}, "other"),
        ({1: "few", 8: "few"}, "few up to 8 rows, reference"),  # what was measured last cannot take any number
    ):
        assert Choice("prefill_attention", candidates, (), forced=False, fastest=fastest).who() == who


def test_each_engine_has_its_own_choice() -> None:
    """An engine is a thread."""
    found = {}
    serving.serve("cpu", {"sample": print})
    try:
        thread = threading.Thread(target=lambda: found.update(there=serving.kernels("cpu")["sample"]))
        thread.start()
        thread.join()
        assert serving.kernels("cpu")["sample"] is print
        assert found["there"] is not print
    finally:
        serving._thread.kernels.clear()


class Point:
    """An entry point, as an installed package declares it."""

    dist = None
    value = "somebody.kernels:OFFER"

    def __init__(self, offered: Any) -> None:
        self.offered = offered

    def load(self) -> Any:
        if isinstance(self.offered, Exception):
            raise self.offered
        return self.offered


@pytest.mark.parametrize("several", [False, True])
def test_installed_packages_offer_theirs_through_an_entry_point(
    several: bool, offers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = kernel("installed", rank=50)
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point([offer] if several else offer)])
    registry._load_offers.cache_clear()
    choice = registry.choose(signature(), {})["prefill_attention"]
    assert choice.who() == "installed"
    assert choice.candidates[0].version == "somebody.kernels:OFFER"


def test_a_broken_package_keeps_no_engine_from_starting(offers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point(ImportError("no libfoo"))])
    registry._load_offers.cache_clear()
    with pytest.warns(FastgraphWarning, match=r"somebody.kernels:OFFER are left out: ImportError: no libfoo"):
        assert registry.choose(signature(), {})["sample"].who() == "reference"


LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 24, "num_experts": 8}
QWEN3_MOE |= {"num_experts_per_tok": 3}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 32}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}


@pytest.mark.parametrize(
    ("config", "on_gpu", "on_cpu"),
    [(LLAMA, {"rope"}, set()), (MISTRAL, {"rope", "window"}, {"window"}), (QWEN3, {"rope", "norms"}, set())],
)
def test_what_a_model_asks_is_found_by_running_it_without_data(
    config: dict[str, Any], on_gpu: set[str], on_cpu: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "capability", lambda device: (9, 0))
    for device, features in (("cuda", on_gpu), ("cpu", on_cpu)):
        found = signature_of(config, device, torch.bfloat16, 16, graphs=device == "cuda")
        assert found.features == features
        assert (found.heads, found.kv_heads, found.head_dim) == (4, 2, config.get("head_dim", 16))
        assert (found.hidden, found.vocab, found.layers, found.page_size) == (64, 100, 2, 16)


@pytest.mark.parametrize(("config", "sizes"), [(LLAMA, (96, 0, 0)), (MIXTRAL, (96, 4, 2)), (QWEN3_MOE, (24, 8, 3))])
def test_the_sizes_of_mlps_and_experts_are_the_models(config: dict[str, Any], sizes: tuple[int, ...]) -> None:
    found = signature_of(config, "cpu", torch.float32, 16, graphs=False)
    assert (found.intermediate, found.experts, found.top_k) == sizes


def test_the_flag_and_the_option_say_the_same() -> None:
    with pytest.raises(ConfigError, match="kernels maps ops to names"):
        EngineConfig(kernels={"sample": 3})  # type: ignore[dict-item]
    run = CliRunner().invoke(app, ["generate", "x", "--kernel", "sample"])
    assert run.exit_code == 2
    assert "OP=NAME" in run.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_says_who_serves_and_why(tmp_path: Any) -> None:
    short = CliRunner().invoke(app, ["kernels"])
    assert short.exit_code == 0
    assert "decode_attention  reference" in short.stdout
    explained = CliRunner().invoke(app, ["kernels", "--explain", "--kernel", "sample=reference"]).stdout
    assert "serves: forced" in explained
    assert "serves: the highest rank that fits" in explained
    assert len(re.findall(r"^    triton +runs on cuda$", explained, re.MULTILINE)) == len(registry.OPS) - 1
    unknown = CliRunner().invoke(app, ["kernels", "--kernel", "sample=fast"])
    assert unknown.exit_code == 1
