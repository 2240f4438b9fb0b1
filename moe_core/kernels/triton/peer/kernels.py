"""The kernels of one forward between ranks, and how they wait for each other; see the package for why that is safe.

`buffer`, `offsets`, `state`, `counts`, `ids` and `weights` are those of `PeerBuffer` (where tokens are sent, `ids` and
`weights` are the caller's), `SLOTS`, `WEIGHTS`, `SUMS` and `NUMBERS` the sections of `PeerLayout`, in bytes. A program
moves `CHUNK` of the `WIDTH` values of a row at a time; `SOME_K` is `TOP_K` or the next larger power of two.
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
def section(buffer, offsets, rank, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """A section of a rank's buffer."""
    start = tl.multiple_of(tl.load(offsets + rank), 16)
    return (buffer + start + OFFSET).to(tl.pointer_type(DTYPE), bitcast=True)


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
def announce(buffer, offsets, number, forward, value, SIZE: tl.constexpr, NUMBERS: tl.constexpr):
    """Set one of the numbers of every rank to a forward and a value: all that was written before it is there."""
    ranks = tl.arange(0, triton.next_power_of_2(SIZE))
    starts = tl.load(offsets + ranks, mask=ranks < SIZE, other=0)
    places = (buffer + NUMBERS + starts).to(tl.pointer_type(tl.int64), bitcast=True) + number
    news = tl.zeros_like(starts) + (tl.cast(forward, tl.int64) << 32) + value
    tl.atomic_xchg(places, news, mask=ranks < SIZE, sem="release", scope="sys")


@triton.jit
def try_out(buffer, offsets, RANK: tl.constexpr, SIZE: tl.constexpr, NUMBERS: tl.constexpr):
    """Announce the tokens of a first forward."""
    announce(buffer, offsets, RANK, 1, 0, SIZE, NUMBERS)


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
    NUMBERS: tl.constexpr,
    PDL: tl.constexpr,
    SLOTS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    SOME_K: tl.constexpr,
):
    """Write tokens and slots to the ranks that have any of their experts, then tell all how many there were."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    CHUNKS: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    DTYPE: tl.constexpr = hidden.dtype.element_ty
    slots = tl.arange(0, SOME_K)
    num_slots = tl.load(first_slots + SIZE)
    for item in range(tl.program_id(0), num_tokens * CHUNKS, tl.num_programs(0)):
        token = tl.cast(item // CHUNKS, tl.int64)
        columns = item % CHUNKS * CHUNK + tl.arange(0, CHUNK)
        row = tl.load(hidden + token * stride + columns, mask=columns < WIDTH)
        found = tl.load(ids + token * stride_it + slots * stride_ik, mask=slots < TOP_K, other=-1)
        tl.device_assert((found >= -1) & (found < num_slots), "topk_ids: an expert id is out of range")
        slot = found.to(tl.int32)
        place = RANK * CAPACITY + token
        # This rank's own tokens last: those of others have a longer way.
        for turn in tl.static_range(1, SIZE + 1):
            to = (RANK + turn) % SIZE
            first = tl.load(first_slots + to)
            is_there = (slot >= first) & (slot < tl.load(first_slots + to + 1))
            if item % CHUNKS == 0:
                weight = tl.load(weights + token * stride_wt + slots * stride_wk, mask=slots < TOP_K).to(tl.float32)
                its_slots = section(buffer, offsets, to, SLOTS, tl.int32) + place * TOP_K + slots
                its_weights = section(buffer, offsets, to, WEIGHTS, tl.float32) + place * TOP_K + slots
                tl.store(its_slots, tl.where(is_there, slot - first, -1), mask=slots < TOP_K)
                tl.store(its_weights, weight, mask=slots < TOP_K)
            # Columns to be written: none of a token that has no expert there.
            width = tl.where(tl.max(is_there.to(tl.int32), axis=0) > 0, WIDTH, 0)
            its_row = section(buffer, offsets, to, 0, DTYPE) + place * WIDTH + columns
            tl.store(its_row, row, mask=columns < width)
    if is_last_program(state + _SENDING):
        forward = tl.load(state + _SENT) + 1
        tl.store(state + _SENT, forward)
        announce(buffer, offsets, RANK, forward, num_tokens, SIZE, NUMBERS)


@triton.jit
def receive_slots(
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
    NUMBERS: tl.constexpr,
    PDL: tl.constexpr,
    SLOTS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Wait for a sender's tokens, and copy a block of their slots: -1 behind the last token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    sender, block = tl.program_id(0) % SIZE, tl.program_id(0) // SIZE
    forward = tl.load(state + _RECEIVED) + 1
    num_slots = wait_for(section(buffer, offsets, RANK, NUMBERS, tl.int64) + sender, forward) * TOP_K
    inside = block * BLOCK + tl.arange(0, BLOCK)
    place = sender.to(tl.int64) * (CAPACITY * TOP_K) + inside
    is_place, is_slot = inside < CAPACITY * TOP_K, inside < num_slots
    found = tl.load(section(buffer, offsets, RANK, SLOTS, tl.int32) + place, mask=is_slot, other=-1)
    tl.store(ids + place, found, mask=is_place)
    weight = tl.load(section(buffer, offsets, RANK, WEIGHTS, tl.float32) + place, mask=is_slot, other=0.0)
    tl.store(weights + place, weight, mask=is_place)
    if block == 0:
        tl.store(counts + sender, num_slots // TOP_K)
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
    NUMBERS: tl.constexpr,
    PDL: tl.constexpr,
    SUMS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    SOME_K: tl.constexpr,
):
    """Write sums to the ranks of their tokens, and tell all after each piece."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    CHUNKS: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    DTYPE: tl.constexpr = sums.dtype.element_ty
    slots = tl.arange(0, SOME_K)
    forward = tl.load(state + _RETURNED) + 1
    for piece in range(PIECES):
        # Sums of this rank's own tokens stay where they are.
        for turn in tl.static_range(1, SIZE):
            to = (RANK + turn) % SIZE
            its_sums = section(buffer, offsets, to, SUMS, DTYPE)
            end = tl.minimum(tl.load(counts + to), (piece + 1) * PIECE)
            for item in range(piece * PIECE * CHUNKS + tl.program_id(0), end * CHUNKS, tl.num_programs(0)):
                token = tl.cast(item // CHUNKS, tl.int64)
                columns = item % CHUNKS * CHUNK + tl.arange(0, CHUNK)
                found = tl.load(ids + (to * CAPACITY + token) * TOP_K + slots, mask=slots < TOP_K, other=-1)
                width = tl.where(tl.max(found, axis=0) >= 0, WIDTH, 0)
                row = tl.load(sums + (to * CAPACITY + token) * WIDTH + columns, mask=columns < width)
                tl.store(its_sums + (RANK * CAPACITY + token) * WIDTH + columns, row, mask=columns < width)
        if is_last_program(state + _RETURNING + piece):
            if piece == PIECES - 1:
                tl.store(state + _RETURNED, forward)
            announce(buffer, offsets, (1 + piece) * SIZE + RANK, forward, 0, SIZE, NUMBERS)


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
    NUMBERS: tl.constexpr,
    PDL: tl.constexpr,
    SUMS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    SOME_K: tl.constexpr,
):
    """Wait for each piece of sums, and add up those of its tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    CHUNKS: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    DTYPE: tl.constexpr = sums.dtype.element_ty
    slots = tl.arange(0, SOME_K)
    numbers = section(buffer, offsets, RANK, NUMBERS, tl.int64)
    forward = tl.load(state + _ADDED_UP) + 1
    for piece in range(PIECES):
        for sender in tl.static_range(SIZE):
            wait_for(numbers + (1 + piece) * SIZE + sender, forward)
        end = tl.minimum(num_tokens, (piece + 1) * PIECE)
        for item in range(piece * PIECE * CHUNKS + tl.program_id(0), end * CHUNKS, tl.num_programs(0)):
            token = tl.cast(item // CHUNKS, tl.int64)
            columns = item % CHUNKS * CHUNK + tl.arange(0, CHUNK)
            slot = tl.load(ids + token * stride_it + slots * stride_ik, mask=slots < TOP_K, other=-1).to(tl.int32)
            total = tl.zeros((CHUNK,), dtype=tl.float32)
            for sender in tl.static_range(SIZE):
                is_there = (slot >= tl.load(first_slots + sender)) & (slot < tl.load(first_slots + sender + 1))
                # Masked, not multiplied by zero: what nobody sent may be NaN.
                width = tl.where(tl.max(is_there.to(tl.int32), axis=0) > 0, WIDTH, 0)
                its = sums if sender == RANK else section(buffer, offsets, RANK, SUMS, DTYPE)
                row = its + (sender * CAPACITY + token) * WIDTH + columns
                total += tl.load(row, mask=columns < width, other=0.0).to(tl.float32)
            tl.store(out + token * WIDTH + columns, narrow(total, DTYPE), mask=columns < WIDTH)
    if is_last_program(state + _ADDING_UP):
        tl.store(state + _ADDED_UP, forward)
    if PDL:
        tl.extra.cuda.gdc_wait()
