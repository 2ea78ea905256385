"""The sampler's first pass: a program for each row and tile of 4096 tokens reads the logits, as the row adjusts them.

A thread reads 32 tokens, a group, and needs nothing of any other: there is neither a shuffle nor a barrier.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fastgraph.kernels.launch import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

LANES = tl.constexpr(128)  # threads of a program
EACH = tl.constexpr(32)  # tokens of a thread
TILE = tl.constexpr(128 * 32)

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def exp(x):
    """As PyTorch's on a GPU; Triton's own is faster and less exact. Its interpreter has NumPy's alone."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def log(x):
    if INTERPRETED:
        return tl.log(x)
    else:
        return libdevice.log(x)


@triton.jit
def log2(x):
    """To about 2^-22, of what is not denormal."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, axis: tl.constexpr):
    """Maximum; NaN if there is one."""
    if INTERPRETED:  # where a reduction of one's own takes a call for each element
        return tl.where(tl.max((x != x).to(tl.int32), axis) > 0, float("nan"), tl.max(x, axis))
    else:
        return tl.reduce(x, axis, _larger)


@triton.jit
def mix(x):
    """`sampling._mix`, of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def keys_of(state, strides, slot):
    """`sampling._keys` of one slot."""
    place = mix(tl.load(state.generated + slot).to(tl.uint32, bitcast=True))
    low = tl.load(state.seed + slot * strides.seed).to(tl.uint32, bitcast=True)
    high = tl.load(state.seed + slot * strides.seed + strides.seed_half).to(tl.uint32, bitcast=True)
    return mix(place ^ low), mix(place ^ high ^ 0x5BD1E995)


@triton.jit
def ordered(x):
    """An int32 that orders float32: zeros are equal, every NaN comes after infinity."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def changes(state, strides, slot):
    """Whether a slot's logits are biased, penalised, and kept from ending."""
    biased = tl.load(state.bias_ids + slot * strides.bias_ids) >= 0
    penalised = tl.load(state.repetition + slot) != 1
    penalised |= (tl.load(state.presence + slot) != 0) | (tl.load(state.frequency + slot) != 0)
    early = tl.load(state.generated + slot) < tl.load(state.min_tokens + slot)
    return biased, penalised, early


@triton.jit
def _penalise(x, id, ok, state, strides, slot):
    """`sampling._penalise`."""
    count = tl.load(state.output_counts + slot * strides.output_counts + id, mask=ok, other=0).to(tl.float32)
    in_prompt = tl.load(state.prompt_tokens + slot * strides.prompt_tokens + id, mask=ok, other=0) != 0
    answered = tl.where(count > 0, 1.0, 0.0)
    repetition = tl.where(in_prompt | (count > 0), tl.load(state.repetition + slot), 1.0)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    return x - tl.load(state.presence + slot) * answered - tl.load(state.frequency + slot) * count


@triton.jit
def _fetch(raw, id, tile, width, limit):
    """A tile of a row, for `_widen`."""
    return tl.load(raw + id) if (tile + 1) * TILE <= limit else tl.load(raw + id, mask=id < width, other=0.0)


@triton.jit
def _widen(x, id, tile, limit):
    """The tile as float32, -inf from the limit up."""
    x = x.to(tl.float32)
    if (tile + 1) * TILE > limit:
        x = tl.where(id < limit, x, -float("inf"))
    return x


@triton.jit
def _read(raw, id, tile, width, limit):
    return _widen(_fetch(raw, id, tile, width, limit), id, tile, limit)


@triton.jit
def _adjust(
    raw,
    mine,
    tile,
    width,
    limit,
    state,
    strides,
    slot,
    VECTOR: tl.constexpr,
    N_STOPS: tl.constexpr,
    N_BIASES: tl.constexpr,
    STOPS: tl.constexpr,
    BIASES: tl.constexpr,
):
    """Write a tile of a row with its biases, penalties and bans to `mine`."""
    biased, penalised, early = changes(state, strides, slot)
    for start in range(0, TILE, LANES * VECTOR):
        id = tile * TILE + start + tl.arange(0, LANES * VECTOR)
        x = _read(raw, id, tile, width, limit)
        if penalised:
            x = _penalise(x, id, id < limit, state, strides, slot)
        tl.store(mine + id, x)
    tl.debug_barrier()
    if biased:
        n = tl.arange(0, BIASES)
        id = tl.load(state.bias_ids + slot * strides.bias_ids + n, mask=n < N_BIASES, other=-1)
        here = (id >= 0) & (id < limit) & (id // TILE == tile)
        x = tl.load(raw + id, mask=here, other=0.0).to(tl.float32)
        x += tl.load(state.bias_values + slot * strides.bias_values + n, mask=here, other=0.0)
        if penalised:
            x = _penalise(x, id, here, state, strides, slot)
        tl.store(mine + id, x, mask=here)
        tl.debug_barrier()
    if early:
        n = tl.arange(0, STOPS)
        id = tl.load(state.stop_ids + slot * strides.stop_ids + n, mask=n < N_STOPS, other=-1)
        here = (id >= 0) & (id < limit) & (id // TILE == tile)
        x = tl.load(mine + id, mask=here, other=0.0)
        tl.store(mine + id, tl.where(x != x, x, -float("inf")), mask=here)
        tl.debug_barrier()


@triton.jit
def scan(
    raw_ptr,
    raw_stride,
    width,
    limit,
    slots,
    state,
    strides,
    adjusted,
    known,
    groups,
    N_STOPS: tl.constexpr,
    STOPS: tl.constexpr,
    N_BIASES: tl.constexpr,
    BIASES: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    lane = tl.arange(0, LANES)
    step = tl.arange(0, EACH // VECTOR)[None, :, None] * (LANES * VECTOR) + lane[:, None, None] * VECTOR
    place = step + tl.arange(0, VECTOR)[None, None, :]  # [lanes, steps, vector]: no thread needs another's numbers
    id = tile * TILE + place
    raw = raw_ptr + row * raw_stride
    if OVERLAP:
        gdc_wait()
    fetched = _fetch(raw, id, tile, width, limit)  # on its way while the slot's parameters are looked up
    temperature = tl.load(state.temperature + slot)
    top_k = tl.load(state.top_k + slot)
    top_p = tl.load(state.top_p + slot)
    wanted = tl.load(state.logprobs + slot)
    first, second = keys_of(state, strides, slot)
    biased, penalised, early = changes(state, strides, slot)
    if slot == 0:
        return
    if biased | penalised | early:
        mine = adjusted + row * groups * EACH
        _adjust(raw, mine, tile, width, limit, state, strides, slot, VECTOR, N_STOPS, N_BIASES, STOPS, BIASES)
        x = tl.load(mine + id)
    else:
        x = _widen(fetched, id, tile, limit)
    at = row * groups + tile * LANES + lane
    most = largest(largest(x, 2), 1)  # [lanes]
    tl.store(known.maxima + at, most)
    if (temperature > 0) & ((top_k <= 0) | (top_k >= limit)):
        base = tl.where(most == -float("inf"), 0.0, most)
        depth = x - base[:, None, None]
        # 1 - u from the bits that the noise has: the hash inverted, under the exponent of 1.
        bits = mix(mix(id.to(tl.uint32) ^ first) ^ second) ^ 0xFFFFFFFF
        v = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - (1 - 2.0**-24)
        noise = -log2(v * tl.fma(v, 0.5, 1.0))
        per_unit = LOG2E / tl.maximum(temperature, 1e-30)
        tl.store(known.reach + at, tl.max(tl.max(tl.fma(depth, per_unit, noise), 2), 1))
        if top_p < 1:
            tl.store(known.weights + at, tl.sum(tl.sum(tl.exp2(depth * per_unit), 2), 1))
    if wanted >= 0:
        x = _read(raw, id, tile, width, limit)
        most = largest(largest(x, 2), 1)
        base = tl.where(tl.abs(most) == float("inf"), 0.0, most)
        tl.store(known.raw_maxima + at, most)
        tl.store(known.raw_weights + at, tl.sum(tl.sum(tl.exp2((x - base[:, None, None]) * LOG2E), 2), 1))
