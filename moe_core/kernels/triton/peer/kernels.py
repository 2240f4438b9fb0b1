"""The kernels of one forward between ranks, and how they wait for each other; see the package for why that is safe.

`buffer`, `offsets`, `state`, `counts`, `ids` and `weights` are those of `PeerBuffer`; where tokens are sent and sums
added up, `ids` and `weights` are the caller's. An id there is a slot over all ranks, a rank's own from
`first_slots[rank]` on; what arrives is local. A token has `TOP_K` choices, each an id and a weight. Constants:

* `RANK` of `SIZE` ranks, each with `CAPACITY` tokens at most, of `TOP_K` choices and `WIDTH` values;
* `IDS_AT`, `WEIGHTS_AT`, `SUMS_AT` and `NUMBERS_AT`: where the sections of a `PeerLayout` begin, in bytes;
* `CHUNK`: values of a row that a program moves at a time; each of a token's chunks is an item of work;
* `PIECES`: in how many runs of tokens sums are waited for;
* `PDL`: whether the launch may begin before the one in front of it has ended.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.triton.interpreter import INTERPRETED, narrow

#: Looks at a number that does not rise before a rank is given up: some minutes on a GPU, half a minute interpreted.
_MOST_LOOKS = tl.constexpr(1 << 21 if INTERPRETED.value else 1 << 29)

#: Words of `PeerBuffer.state`: the last forward of each launch, in their order, then how many programs are done of a
#: launch that runs; those of the third launch come last, a word for each piece of sums.
_SENT, _RECEIVED, _RETURNED, _ADDED_UP = (tl.constexpr(word) for word in range(4))
_SENDING, _RECEIVING, _ADDING_UP, _RETURNING = (tl.constexpr(word) for word in range(4, 8))


@triton.jit
def section(buffer, offsets, rank, AT: tl.constexpr, DTYPE: tl.constexpr):
    """A section of a rank's buffer, as values of `DTYPE`."""
    start = tl.multiple_of(tl.load(offsets + rank), 16)
    return (buffer + start + AT).to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def item_of(index, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Token and columns of an item of work; the token in 64 bits, since it is multiplied by a row's length."""
    CHUNKS: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    return tl.cast(index // CHUNKS, tl.int64), index % CHUNKS * CHUNK + tl.arange(0, CHUNK)


@triton.jit
def choices_of(TOP_K: tl.constexpr):
    """Numbers of a token's choices, filled up to a power of two, of two at least."""
    return tl.arange(0, 2 if TOP_K == 1 else triton.next_power_of_2(TOP_K))


@triton.jit
def width_if_any(is_there, WIDTH: tl.constexpr):
    """How many columns to move: all of a token with a choice that is there, else none."""
    return tl.where(tl.max(is_there.to(tl.int32), axis=0) > 0, WIDTH, 0)


@triton.jit
def is_last_program(done):
    """Whether all other programs of this launch have written what they write; counts from zero again then.

    At the scope of the system, since some of that is memory of other devices.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(done, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1
    if is_last:
        tl.store(done, 0)
    return is_last


@triton.jit
def announce(buffer, offsets, number, forward, value, SIZE: tl.constexpr, NUMBERS_AT: tl.constexpr):
    """Set one of the numbers of every rank to a forward and a value: all that was written before it is there."""
    ranks = tl.arange(0, triton.next_power_of_2(SIZE))
    starts = tl.load(offsets + ranks, mask=ranks < SIZE, other=0)
    places = (buffer + NUMBERS_AT + starts).to(tl.pointer_type(tl.int64), bitcast=True) + number
    news = tl.zeros_like(starts) + (tl.cast(forward, tl.int64) << 32) + value
    tl.atomic_xchg(places, news, mask=ranks < SIZE, sem="release", scope="sys")


@triton.jit
def try_out(buffer, offsets, RANK: tl.constexpr, SIZE: tl.constexpr, NUMBERS_AT: tl.constexpr):
    """Announce the tokens of a first forward."""
    announce(buffer, offsets, RANK, 1, 0, SIZE, NUMBERS_AT)


@triton.jit
def wait_for(number, forward):
    """Wait until a rank has set a number of this rank to a forward, and give the value beside it."""
    looks = 0
    while ((tl.load(number, volatile=True) >> 32) != forward) & (looks < _MOST_LOOKS):
        looks += 1
    # What was written before it is seen after this.
    found = tl.atomic_add(number, 0, sem="acquire", scope="sys")
    tl.device_assert((found >> 32) == forward, "peer_memory: a rank did not make the same forward in time")
    tl.debug_barrier()
    return (found & 0xFFFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["num_tokens"])
def send_tokens(
    buffer,
    offsets,
    state,
    hidden,
    ids,
    weights,
    first_slots,
    num_tokens,
    stride,
    stride_it,
    stride_ik,
    stride_wt,
    stride_wk,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    TOP_K: tl.constexpr,
    NUMBERS_AT: tl.constexpr,
    PDL: tl.constexpr,
    IDS_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write tokens and their choices to the ranks that have any of their experts, then tell all how many there were."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    CHUNKS: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    DTYPE: tl.constexpr = hidden.dtype.element_ty
    choices = choices_of(TOP_K)
    num_slots = tl.load(first_slots + SIZE)
    for item in range(tl.program_id(0), num_tokens * CHUNKS, tl.num_programs(0)):
        token, columns = item_of(item, WIDTH, CHUNK)
        row = tl.load(hidden + token * stride + columns, mask=columns < WIDTH)
        found = tl.load(ids + token * stride_it + choices * stride_ik, mask=choices < TOP_K, other=-1)
        tl.device_assert((found >= -1) & (found < num_slots), "topk_ids: an expert id is out of range")
        slot = found.to(tl.int32)
        place = RANK * CAPACITY + token
        # This rank's own tokens last: those of others have a longer way.
        for turn in tl.static_range(1, SIZE + 1):
            to = (RANK + turn) % SIZE
            first = tl.load(first_slots + to)
            is_there = (slot >= first) & (slot < tl.load(first_slots + to + 1))
            if item % CHUNKS == 0:
                weight = tl.load(weights + token * stride_wt + choices * stride_wk, mask=choices < TOP_K)
                its_ids = section(buffer, offsets, to, IDS_AT, tl.int32) + place * TOP_K + choices
                its_weights = section(buffer, offsets, to, WEIGHTS_AT, tl.float32) + place * TOP_K + choices
                tl.store(its_ids, tl.where(is_there, slot - first, -1), mask=choices < TOP_K)
                tl.store(its_weights, weight.to(tl.float32), mask=choices < TOP_K)
            width = width_if_any(is_there, WIDTH)
            its_row = section(buffer, offsets, to, 0, DTYPE) + place * WIDTH + columns
            tl.store(its_row, row, mask=columns < width)
    if is_last_program(state + _SENDING):
        forward = tl.load(state + _SENT) + 1
        tl.store(state + _SENT, forward)
        announce(buffer, offsets, RANK, forward, num_tokens, SIZE, NUMBERS_AT)


@triton.jit
def receive_ids(
    buffer,
    offsets,
    state,
    ids,
    weights,
    counts,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    TOP_K: tl.constexpr,
    NUMBERS_AT: tl.constexpr,
    PDL: tl.constexpr,
    IDS_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Wait for a sender's tokens, and copy `BLOCK` of their choices: -1 behind the last token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    sender, block = tl.program_id(0) % SIZE, tl.program_id(0) // SIZE
    forward = tl.load(state + _RECEIVED) + 1
    num_choices = wait_for(section(buffer, offsets, RANK, NUMBERS_AT, tl.int64) + sender, forward) * TOP_K
    inside = block * BLOCK + tl.arange(0, BLOCK)
    place = sender.to(tl.int64) * (CAPACITY * TOP_K) + inside
    is_place, was_sent = inside < CAPACITY * TOP_K, inside < num_choices
    found = tl.load(section(buffer, offsets, RANK, IDS_AT, tl.int32) + place, mask=was_sent, other=-1)
    tl.store(ids + place, found, mask=is_place)
    weight = tl.load(section(buffer, offsets, RANK, WEIGHTS_AT, tl.float32) + place, mask=was_sent, other=0.0)
    tl.store(weights + place, weight, mask=is_place)
    if block == 0:
        tl.store(counts + sender, num_choices // TOP_K)
    if is_last_program(state + _RECEIVING):
        tl.store(state + _RECEIVED, forward)
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def return_sums(
    buffer,
    offsets,
    state,
    sums,
    ids,
    counts,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    TOP_K: tl.constexpr,
    NUMBERS_AT: tl.constexpr,
    PDL: tl.constexpr,
    SUMS_AT: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write sums to the ranks of their tokens, and tell all after each piece."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    CHUNKS: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    DTYPE: tl.constexpr = sums.dtype.element_ty
    choices = choices_of(TOP_K)
    PIECE: tl.constexpr = (CAPACITY + PIECES - 1) // PIECES
    forward = tl.load(state + _RETURNED) + 1
    for piece in range(PIECES):
        # Sums of this rank's own tokens stay where they are.
        for turn in tl.static_range(1, SIZE):
            to = (RANK + turn) % SIZE
            its_sums = section(buffer, offsets, to, SUMS_AT, DTYPE)
            end = tl.minimum(tl.load(counts + to), (piece + 1) * PIECE)
            for item in range(piece * PIECE * CHUNKS + tl.program_id(0), end * CHUNKS, tl.num_programs(0)):
                token, columns = item_of(item, WIDTH, CHUNK)
                found = tl.load(ids + (to * CAPACITY + token) * TOP_K + choices, mask=choices < TOP_K, other=-1)
                width = tl.where(tl.max(found, axis=0) >= 0, WIDTH, 0)
                row = tl.load(sums + (to * CAPACITY + token) * WIDTH + columns, mask=columns < width)
                tl.store(its_sums + (RANK * CAPACITY + token) * WIDTH + columns, row, mask=columns < width)
        if is_last_program(state + _RETURNING + piece):
            if piece == PIECES - 1:
                tl.store(state + _RETURNED, forward)
            announce(buffer, offsets, (1 + piece) * SIZE + RANK, forward, 0, SIZE, NUMBERS_AT)


@triton.jit(do_not_specialize=["num_tokens"])
def add_sums(
    buffer,
    offsets,
    state,
    sums,
    ids,
    out,
    first_slots,
    num_tokens,
    stride_it,
    stride_ik,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    TOP_K: tl.constexpr,
    NUMBERS_AT: tl.constexpr,
    PDL: tl.constexpr,
    SUMS_AT: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Wait for each piece of sums, and add up those of its tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    CHUNKS: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    DTYPE: tl.constexpr = sums.dtype.element_ty
    choices = choices_of(TOP_K)
    PIECE: tl.constexpr = (CAPACITY + PIECES - 1) // PIECES
    numbers = section(buffer, offsets, RANK, NUMBERS_AT, tl.int64)
    forward = tl.load(state + _ADDED_UP) + 1
    for piece in range(PIECES):
        for sender in tl.static_range(SIZE):
            wait_for(numbers + (1 + piece) * SIZE + sender, forward)
        end = tl.minimum(num_tokens, (piece + 1) * PIECE)
        for item in range(piece * PIECE * CHUNKS + tl.program_id(0), end * CHUNKS, tl.num_programs(0)):
            token, columns = item_of(item, WIDTH, CHUNK)
            found = tl.load(ids + token * stride_it + choices * stride_ik, mask=choices < TOP_K, other=-1)
            slot = found.to(tl.int32)
            total = tl.zeros((CHUNK,), dtype=tl.float32)
            for sender in tl.static_range(SIZE):
                is_there = (slot >= tl.load(first_slots + sender)) & (slot < tl.load(first_slots + sender + 1))
                # Masked, not multiplied by zero: what nobody sent may be NaN.
                width = width_if_any(is_there, WIDTH)
                its = sums if sender == RANK else section(buffer, offsets, RANK, SUMS_AT, DTYPE)
                row = its + (sender * CAPACITY + token) * WIDTH + columns
                total += tl.load(row, mask=columns < width, other=0.0).to(tl.float32)
            tl.store(out + token * WIDTH + columns, narrow(total, DTYPE), mask=columns < WIDTH)
    if is_last_program(state + _ADDING_UP):
        tl.store(state + _ADDED_UP, forward)
    if PDL:
        tl.extra.cuda.gdc_wait()
