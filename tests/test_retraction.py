"""Requests that are pushed out and come back, prompts that share pages, on a real device: no answer changes by it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_device import CPU, PROMPTS, build, expected, reference, request_of

from fastgraph.control.plan import StepPlan
from fastgraph.control.scheduler import Scheduler
from fastgraph.control.states import Request
from fastgraph.device import host_pages
from fastgraph.device.handle import DeviceHandle
from fastgraph.device.host_pages import HostPages
from fastgraph.ops import LayerCache

__all__ = ["reference"]  # a fixture

PENALTIES = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.7, "repetition_penalty": 1.2}
HOST_GB = 0.001


class Session:
    """A scheduler over a device, whose requests are pushed out every so many steps."""

    def __init__(self, device: DeviceHandle, retract_every: int = 0) -> None:
        self.device, self.retract_every = device, retract_every
        self.scheduler = Scheduler(device.limits)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.plans: list[StepPlan] = []

    def run(self, requests: list[Request]) -> Session:
        for request in requests:
            self.scheduler.submit(request)
        while plan := self.scheduler.plan():
            self.plans.append(plan)
            for output in self.scheduler.land(plan, self.device.execute(plan).result()):
                self.tokens[output.request_id] += output.token_ids.tolist()
                if output.logprobs is not None:
                    self.logprobs[output.request_id] += output.logprobs.chosen.tolist()
            if self.retract_every and plan.number % self.retract_every == 0 and self.scheduler.table.running.any():
                self.scheduler.retract_last()
        return self

    @property
    def computed(self) -> int:
        return sum(plan.tokens for plan in self.plans)


@pytest.fixture(scope="module")
def devices(reference: tuple[Any, Path]) -> dict[str, DeviceHandle]:
    shared = {"compile": "off", "max_step_tokens": 17}
    return {
        "saving": build(reference[1], host_kv_gb=HOST_GB, prefix_cache=False, **shared),
        "computing again": build(reference[1], prefix_cache=False, **shared),
        "sharing": build(reference[1], **shared),
        "sharing and saving": build(reference[1], host_kv_gb=HOST_GB, **shared),
    }


KINDS = ["saving", "computing again", "sharing", "sharing and saving"]


# What is computed again from its first token needs a few steps to come further than before.
@pytest.mark.parametrize(
    ("kind", "every"), [(kind, every) for kind in KINDS for every in (1, 2, 6) if every > 5 or "again" not in kind]
)
def test_greedy_answers_are_transformers_however_often_they_are_interrupted(
    reference: tuple[Any, Path], devices: dict[str, DeviceHandle], kind: str, every: int
) -> None:
    session = Session(devices[kind], every).run([request_of(i, p, 12) for i, p in enumerate(PROMPTS)])
    assert [session.tokens[i] for i in range(len(PROMPTS))] == expected(reference[0], PROMPTS, 12)
    assert session.scheduler.preemptions > 2
    assert any(len(plan.restores) for plan in session.plans) == ("saving" in kind)
    assert (session.scheduler.preemptions_saved > 2) == ("saving" in kind)


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_penalties_and_logprobs_survive(devices: dict[str, DeviceHandle], kind: str) -> None:
    options = {**PENALTIES, "frequency_penalty": 0.4, "logprobs": True, "incremental": True}
    requests = [request_of(i, p, 20, **options) for i, p in enumerate(PROMPTS)]
    plain, interrupted = Session(devices["saving"]).run(requests), Session(devices[kind], 6).run(requests)
    assert plain.scheduler.preemptions == 0
    assert interrupted.scheduler.preemptions > 2
    assert interrupted.tokens == plain.tokens
    for number, logprobs in plain.logprobs.items():
        assert interrupted.logprobs[number] == pytest.approx(logprobs, abs=1e-4)


def test_what_was_saved_is_not_computed_again(devices: dict[str, DeviceHandle]) -> None:
    requests = [request_of(i, p, 12) for i, p in enumerate(PROMPTS)]
    plain, saved = Session(devices["saving"]).run(requests), Session(devices["saving"], 2).run(requests)
    assert saved.scheduler.preemptions > 2
    assert saved.computed == plain.computed


def test_a_host_that_is_too_small_for_all_of_a_request_saves_none_of_it(reference: tuple[Any, Path]) -> None:
    model, folder = reference
    page_bytes = 3 * 2 * 4 * 2 * 16 * 4  # layers, k and v, page size, heads, head_dim, float32
    device = build(folder, compile="off", host_kv_gb=3.5 * page_bytes / 1e9, prefix_cache=False)
    assert device.limits.host_pages == 3
    session = Session(device, 4).run([request_of(1, [3] * 9, 12)])
    assert [session.tokens[1]] == expected(model, [[3] * 9], 12)
    copies = [(len(plan.snapshots), len(plan.restores)) for plan in session.plans]
    assert (3, 3) in copies  # 12 tokens, in and out in one plan
    assert max(copies) == (3, 3)


def test_a_prompt_that_is_wholly_cached_has_its_last_page_computed_and_no_more(
    reference: tuple[Any, Path], devices: dict[str, DeviceHandle]
) -> None:
    prompt = list(range(20, 36))  # four pages
    session = Session(devices["sharing"]).run([request_of(1, prompt, 6)])
    before = session.computed
    session.run([request_of(2, prompt, 6)])
    assert session.tokens[1] == session.tokens[2] == expected(reference[0], [prompt], 6)[0]
    assert session.computed - before == 4 + 5
    assert session.scheduler.prefix_hit_tokens == 12


def test_a_conversations_next_turn_computes_what_is_new(
    reference: tuple[Any, Path], devices: dict[str, DeviceHandle]
) -> None:
    """Turn by turn; the answers' pages are shared too, up to the last token, which was never computed."""
    session = Session(devices["sharing"])
    history = [5, 6, 7, 8, 9]
    for turn in range(1, 5):
        before = session.computed
        session.run([request_of(turn, history, 10)])
        assert session.tokens[turn] == expected(reference[0], [history], 10)[0]
        if turn > 1:
            assert session.computed - before <= 3 + 4 + 10  # what is new, the rest of a page, and the answer
        history = [*history, *session.tokens[turn], 40, 41, 42]


def test_answers_to_one_prompt_share_it_and_penalties_see_all_of_it(devices: dict[str, DeviceHandle]) -> None:
    prompt = list(range(30, 70))
    requests = [request_of(i, prompt, 8, **PENALTIES) for i in range(6)]
    alone, together = Session(devices["saving"]).run(requests), Session(devices["sharing"]).run(requests)
    assert together.tokens == alone.tokens
    assert together.computed == 40 + 5 * 4 + 6 * 7  # the prompt once, and each time its last page


def test_a_rope_that_looks_ahead_shares_nothing_past_the_trained_length(
    reference: tuple[Any, Path], tmp_path: Path
) -> None:
    """The same tokens have other keys in a longer prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**reference[0].config.to_dict(), "max_position_embeddings": 32})
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert build(tmp_path, compile="off").limits.max_model_len == 4 * 32
    assert not build(tmp_path, compile="off").limits.prefix_cache
    assert build(tmp_path, compile="off", max_model_len=32).limits.prefix_cache


def test_pages_are_copied_out_before_others_are_copied_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In portions, and over blocks of host memory, that are smaller than what there is to copy."""
    caches = [LayerCache(*torch.randn(2, 9, 4, 2, 3)) for _ in range(3)]  # 9 pages
    before = [part.clone() for cache in caches for part in cache]
    page_bytes = 6 * 4 * 2 * 3 * 4
    monkeypatch.setattr(host_pages, "BLOCK_BYTES", 2 * page_bytes)
    monkeypatch.setattr(host_pages, "STAGED_BYTES", 3 * page_bytes)
    pages = HostPages(CPU)
    out = np.array([[page, 9 - page] for page in range(1, 9)], np.int32)
    back = np.array([[host_page, host_page] for host_page in range(1, 9)], np.int32)
    pages.copy(_plan(out, back), caches)  # every page goes to where another one was
    for part, was in zip((part for cache in caches for part in cache), before, strict=True):
        assert torch.equal(part[1:], was[1:].flip(0))
        assert torch.equal(part[0], was[0])


def _plan(snapshots: Any, restores: Any) -> StepPlan:
    return StepPlan(1, (), np.empty((0, 3), np.int32), np.empty(0, np.int32), (), snapshots, restores)
