"""Per-slot state that lives on the device. A decoding request is a slot: a row in these tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgraph.config import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams
from fastgraph.control.plan import NULL_SLOT, Admission, Int32, Limits, StepPlan
from fastgraph.device.upload import upload
from fastgraph.kernels.sampling import SamplerState

# An int32 matrix holds the numbers of a slot, a row per field. The float fields are stored as their bits.
FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
INTS = (
    *("length", "prompt_length", "generated", "min_tokens", "logprobs"),
    *("top_k", "seed_low", "seed_high"),
)
FIELDS = {name: row for row, name in enumerate(FLOATS + INTS)}
_ALIGN = 64  # numbers, to a multiple of which a table begins
TABLE_WIDTH = len(FIELDS) + MAX_STOP_IDS + _ALIGN  # numbers of a slot beside its pages, at most


class SlotState(NamedTuple):
    """Views of the tables, as the compiled step takes them. [slots] unless noted."""

    recent: Tensor  # [multi_step, slots] int32, the tokens sampled last: number i of an answer in row i % multi_step
    lengths: Tensor  # int32, tokens whose KV is in the slot's pages
    prompt_lengths: Tensor  # int32
    page_table: Tensor  # [slots, pages_per_slot] int32
    sampler: SamplerState


class Slots:
    """The tables, and the only code that sets a slot up. Slot 0 is the null slot: it keeps length 0 and page 0."""

    def __init__(self, limits: Limits, model_vocab: int, device: torch.device) -> None:
        rows = limits.slots + 1
        self._device = device
        pages_per_slot = -(-limits.max_model_len // limits.page_size)
        # What most plans change lies in one piece of memory: whatever a plan changes of it is one copy and one kernel.
        shapes = ((rows, pages_per_slot), (len(FIELDS), rows), (rows, MAX_STOP_IDS))
        sizes = [-(-height * width // _ALIGN) * _ALIGN for height, width in shapes]
        self._tables = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        pages, self._fields, stop_ids = (
            part[: shape[0] * shape[1]].view(shape)
            for part, shape in zip(self._tables.split(sizes), shapes, strict=True)
        )
        stop_ids.fill_(-1)
        # Where a table's rows begin in it.
        self._pages_at = np.arange(rows) * pages_per_slot
        self._fields_at = sizes[0] + np.arange(len(FIELDS)) * rows
        self._stop_ids_at = sizes[0] + sizes[1] + np.arange(rows) * MAX_STOP_IDS
        self._bias_ids = torch.full((rows, MAX_LOGIT_BIAS), -1, dtype=torch.int32, device=device)
        self._bias_values = torch.zeros(rows, MAX_LOGIT_BIAS, device=device)
        self._output_counts = torch.zeros(rows, model_vocab, dtype=torch.int16, device=device)
        self._prompt_tokens = torch.zeros(rows, model_vocab, dtype=torch.bool, device=device)
        self._biased: set[int] = set()  # slots whose bias row is not empty
        self.wants_logprobs = np.zeros(rows, bool)  # on the host: whether results must carry them
        self._recent = torch.zeros(limits.multi_step, rows, dtype=torch.int32, device=device)
        # Where in it, made flat, each slot's next token will stand: so many rows on with every token, and round again.
        self._next = np.zeros(rows, np.int64)
        self._ahead = np.arange(limits.multi_step)[:, None] * rows
        self._field("repetition").fill_(1.0)
        self._field("top_p").fill_(1.0)
        self._field("logprobs").fill_(-1)
        self.state = SlotState(
            recent=self._recent,
            lengths=self._field("length"),
            prompt_lengths=self._field("prompt_length"),
            page_table=pages,
            sampler=SamplerState(
                temperature=self._field("temperature"),
                top_k=self._field("top_k"),
                top_p=self._field("top_p"),
                min_p=self._field("min_p"),
                repetition=self._field("repetition"),
                presence=self._field("presence"),
                frequency=self._field("frequency"),
                seed=self._fields[FIELDS["seed_low"] : FIELDS["seed_high"] + 1].T,
                generated=self._field("generated"),
                min_tokens=self._field("min_tokens"),
                stop_ids=stop_ids,
                bias_ids=self._bias_ids,
                bias_values=self._bias_values,
                logprobs=self._field("logprobs"),
                output_counts=self._output_counts,
                prompt_tokens=self._prompt_tokens,
            ),
        )

    def _field(self, name: str) -> Tensor:
        row = self._fields[FIELDS[name]]
        return row.view(torch.float32) if name in FLOATS else row

    def apply(self, plan: StepPlan) -> None:
        """Bring the tables up to date with a plan, before its step runs."""
        if not plan.admissions and not len(plan.page_writes):
            return
        slots, index, pages = plan.page_writes.T
        places, values = [self._pages_at[slots] + index], [pages]
        for admission in plan.admissions:
            self._admit(admission)
            places += [self._fields_at + admission.slot, self._stop_ids_at[admission.slot] + np.arange(MAX_STOP_IDS)]
            values += [_pack(admission), _padded(admission.stop_ids, MAX_STOP_IDS)]
        where, what = upload(np.stack([np.concatenate(places), np.concatenate(values)]).astype(np.int32), self._device)
        self._tables[where] = what

    def advance(self, plan: StepPlan) -> NDArray[np.int64]:
        """Where in `state.recent`, made flat, the tokens of the plan will stand, one step's behind the other's.

        What is beyond its end is at its beginning, once round and no more. Call it once for each plan, in their order.
        The tokens stand there until the next plan's steps run.
        """
        slots = plan.sampling_slots
        first = self._next[slots]
        self._next[slots] = (first + plan.repeats * len(self._next)) % self._recent.numel()
        return (first + self._ahead[: plan.repeats]).ravel()

    def _admit(self, admission: Admission) -> None:
        """What is seldom needed, and what the host keeps."""
        self._set_bias(admission.slot, admission.sampling)
        if _penalised(admission.sampling):
            self._set_history(admission)
        self.wants_logprobs[admission.slot] = admission.sampling.logprobs
        self._next[admission.slot] = admission.slot + len(admission.answer) % len(self._recent) * len(self._next)

    def _set_bias(self, slot: int, sampling: SamplingParams) -> None:
        if slot in self._biased:
            self._bias_ids[slot].fill_(-1)
            self._biased.remove(slot)
        if sampling.logit_bias:
            ids = np.array(list(sampling.logit_bias), np.int32)
            values = np.array(list(sampling.logit_bias.values()), np.float32)
            self._bias_ids[slot, : len(ids)] = upload(ids, self._device)
            self._bias_values[slot, : len(ids)] = upload(values.view(np.int32), self._device).view(torch.float32)
            self._biased.add(slot)

    def _set_history(self, admission: Admission) -> None:
        """The penalties look back: at the prompt, and at what a preempted request had generated."""
        counts, prompt = self._output_counts[admission.slot], self._prompt_tokens[admission.slot]
        prompt.zero_()
        prompt[upload(admission.prompt, self._device)] = True
        counts.zero_()
        if len(admission.answer):
            ids, times = np.unique(admission.answer, return_counts=True)
            counts[upload(ids, self._device)] = upload(times.astype(np.int32), self._device).to(torch.int16)


def _penalised(sampling: SamplingParams) -> bool:
    neutral = (1.0, 0.0, 0.0)
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != neutral


def _padded(ids: Sequence[int], length: int) -> Int32:
    row = np.full(length, -1, np.int32)
    row[: len(ids)] = ids
    return row


def _pack(admission: Admission) -> Int32:
    """A slot's column of the field matrix."""
    assert admission.slot != NULL_SLOT
    s = admission.sampling
    top_p = max(s.top_p, float(np.finfo(np.float32).tiny))  # or float32 could make 0 of it, which keeps no token
    floats = (s.temperature, top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    low, high = admission.seed & 0xFFFFFFFF, admission.seed >> 32
    ints = (
        admission.computed,  # length
        len(admission.prompt),
        len(admission.answer),
        min(s.min_tokens, 2**31 - 1),
        s.top_logprobs if s.logprobs else -1,
        min(s.top_k, 2**31 - 1),
        low - 2**32 if low >= 2**31 else low,
        high,
    )
    return np.concatenate([np.array(floats, np.float32).view(np.int32), np.array(ints, np.int32)])
