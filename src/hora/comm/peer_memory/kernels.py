"""The kernels that work in memory that every GPU of the group reads, in Triton: the all-reduces of algorithm `symmetric`, and what `pulling` needs.

A block of an all-reduce works with the block of its number on the other GPUs, and with none else. It goes through tiles of the tensor; tile
number `epoch`, counted over all calls, goes into slot `epoch % SLOTS` of the block's own share of the window. Two flags a block and peer hold the
epoch up to which that peer has got: `PUT`, its numbers of the tile are in its window; `SUMMED`, its part of the tile is. Flags only grow, and the
counters live on the device, so that a CUDA graph that is replayed goes on where the last call has ended.

Why `SLOTS` are enough: a block writes a slot of its window for tile e at the earliest while it is at e - 1, before it waits for the others' word on
e - 1. It has their word on e - 2 then, which each gave at e - 3 at the earliest, when it had read all of e - 5. So it may overwrite that one.

A flag is written with release and read with acquire, both system-wide, by one thread, with a barrier of the block between it and the data of the
others (PTX ISA, memory consistency model). A peer that does not come until the deadline is written down for the host, and the kernel traps: the
process can use its GPU no more, but never goes on with numbers that are no sums.
"""

from typing import Any

import triton
import triton.language as tl

PUT: Any = tl.constexpr(0)
SUMMED: Any = tl.constexpr(1)


@triton.jit
def _tell(address, epoch):
    """One thread writes `epoch` at `address`, after all that the block has written before."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred other;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.ne.u32 other, thread, 0;
        @other bra TOLD;
        st.release.sys.global.s64 [$1], $2;
        TOLD:
        mov.u32 $0, 0;
        }""",
        "=r,l,l",
        [address, epoch],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _await(address, epoch, peer, fault, limit_ns):
    """One thread waits until `address` holds `epoch` or a later one; past the limit it writes peer + 1 to `fault` and traps."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred done;
        .reg .u32 thread;
        .reg .s64 seen;
        .reg .u64 now;
        .reg .u64 end;
        mov.u32 thread, %tid.x;
        setp.ne.u32 done, thread, 0;
        @done bra HERE;
        mov.u64 end, %globaltimer;
        add.u64 end, end, $5;
        AGAIN:
        ld.acquire.sys.global.s64 seen, [$1];
        setp.ge.s64 done, seen, $2;
        @done bra HERE;
        mov.u64 now, %globaltimer;
        setp.lt.u64 done, now, end;
        @done bra AGAIN;
        st.volatile.global.s32 [$4], $3;
        fence.sc.sys;
        trap;
        HERE:
        mov.u32 $0, 0;
        }""",
        "=r,l,l,r,l,l",
        [address, epoch, peer + 1, fault, limit_ns],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _flag(bases, owner, flag: tl.constexpr, block, writer, WORLD: tl.constexpr, BLOCKS: tl.constexpr):
    """Address of the flag of `block` in the window of `owner` that `writer` writes."""
    base = tl.load(bases + owner)
    return base + ((flag * BLOCKS + block) * WORLD + writer) * 8


@triton.jit
def _tell_all(bases, flag: tl.constexpr, epoch, block, rank, WORLD: tl.constexpr, BLOCKS: tl.constexpr):
    tl.debug_barrier()
    for step in tl.static_range(1, WORLD):
        _tell(_flag(bases, (rank + step) % WORLD, flag, block, rank, WORLD, BLOCKS), epoch)


@triton.jit
def _await_all(bases, flag: tl.constexpr, epoch, block, fault, limit_ns, rank, WORLD: tl.constexpr, BLOCKS: tl.constexpr):
    for step in tl.static_range(1, WORLD):
        _await(_flag(bases, rank, flag, block, (rank + step) % WORLD, WORLD, BLOCKS), epoch, (rank + step) % WORLD, fault, limit_ns)
    tl.debug_barrier()


@triton.jit
def _slot(bases, owner, block, epoch, tensor, DATA: tl.constexpr, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr):
    """The slot of `block` in the window of `owner` for tile `epoch`, as a pointer to elements of `tensor`'s type."""
    base = tl.load(bases + owner)
    place = base + DATA + (block * SLOTS + epoch % SLOTS) * SLOT_BYTES
    return tl.multiple_of(place.to(tl.pointer_type(tensor.dtype.element_ty)), 16)


@triton.jit
def _read(bases, owner, block, epoch, tensor, at, mask, DATA: tl.constexpr, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr):
    return tl.load(_slot(bases, owner, block, epoch, tensor, DATA, SLOTS, SLOT_BYTES) + at, mask=mask, cache_modifier=".cg")


@triton.jit
def _sum(bases, block, epoch, tensor, at, mask, WORLD: tl.constexpr, DATA: tl.constexpr, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr):
    """The sum of all ranks' numbers in the tree of `plan.logical`: neighbours in pairs, these in pairs, and so on."""
    total = _read(bases, 0, block, epoch, tensor, at, mask, DATA, SLOTS, SLOT_BYTES) + _read(
        bases, 1, block, epoch, tensor, at, mask, DATA, SLOTS, SLOT_BYTES
    )
    if WORLD > 2:
        pair = _read(bases, 2, block, epoch, tensor, at, mask, DATA, SLOTS, SLOT_BYTES)
        if WORLD > 3:
            pair += _read(bases, 3, block, epoch, tensor, at, mask, DATA, SLOTS, SLOT_BYTES)
        total += pair
    if WORLD > 4:
        four = _read(bases, 4, block, epoch, tensor, at, mask, DATA, SLOTS, SLOT_BYTES)
        if WORLD > 5:
            four += _read(bases, 5, block, epoch, tensor, at, mask, DATA, SLOTS, SLOT_BYTES)
        if WORLD > 6:
            pair = _read(bases, 6, block, epoch, tensor, at, mask, DATA, SLOTS, SLOT_BYTES)
            if WORLD > 7:
                pair += _read(bases, 7, block, epoch, tensor, at, mask, DATA, SLOTS, SLOT_BYTES)
            four += pair
        total += four
    return total


@triton.jit
def _put(
    tensor, bases, begin, count, numel, block, epoch,
    rank, DATA: tl.constexpr, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Copies `count` elements of the tensor from `begin` on into this rank's slot."""
    slot = _slot(bases, rank, block, epoch, tensor, DATA, SLOTS, SLOT_BYTES)
    for first in range(0, count, STRIDE):
        at = first + tl.arange(0, STRIDE)
        mask = (at < count) & (begin + at < numel)
        tl.store(slot + at, tl.load(tensor + begin + at, mask=mask), mask=mask)


@triton.jit
def _sum_part(
    tensor, bases, begin, part, numel, block, epoch,
    rank, WORLD: tl.constexpr, DATA: tl.constexpr, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Sums this rank's part of the tile, into the tensor and, for the others, into its slot."""
    slot = _slot(bases, rank, block, epoch, tensor, DATA, SLOTS, SLOT_BYTES)
    mine = rank * part
    for first in range(0, part, STRIDE):
        at = mine + first + tl.arange(0, STRIDE)
        mask = (at < mine + part) & (begin + at < numel)
        total = _sum(bases, block, epoch, tensor, at, mask, WORLD, DATA, SLOTS, SLOT_BYTES)
        tl.store(slot + at, total, mask=mask)
        tl.store(tensor + begin + at, total, mask=mask)


@triton.jit
def _gather(
    tensor, bases, begin, part, numel, block, epoch,
    rank, WORLD: tl.constexpr, DATA: tl.constexpr, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Copies the other ranks' sums of their parts of the tile into the tensor."""
    for step in tl.static_range(1, WORLD):
        theirs = ((rank + step) % WORLD) * part
        for first in range(0, part, STRIDE):
            at = theirs + first + tl.arange(0, STRIDE)
            mask = (at < theirs + part) & (begin + at < numel)
            numbers = _read(bases, (rank + step) % WORLD, block, epoch, tensor, at, mask, DATA, SLOTS, SLOT_BYTES)
            tl.store(tensor + begin + at, numbers, mask=mask)


@triton.jit(do_not_specialize=["rank"])
def one_shot(
    tensor, bases, epochs, fault, limit_ns, numel, tile,
    rank, WORLD: tl.constexpr, BLOCKS: tl.constexpr, DATA: tl.constexpr, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Sums `tensor`, of `numel` elements, in place: every rank reads all the others' numbers. `tile`: elements that a block puts at once."""
    block = tl.program_id(0)
    epoch = tl.load(epochs + block)
    limit_ns, fault = limit_ns.to(tl.int64), fault.to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * tile
    for begin in tl.range(block.to(tl.int64) * tile, tl.full((), numel, tl.int64), stride, num_stages=1):
        epoch += 1
        _put(tensor, bases, begin, tile, numel, block, epoch, rank, DATA, SLOTS, SLOT_BYTES, STRIDE)
        _tell_all(bases, PUT, epoch, block, rank, WORLD, BLOCKS)
        _await_all(bases, PUT, epoch, block, fault, limit_ns, rank, WORLD, BLOCKS)
        for first in range(0, tile, STRIDE):
            at = first + tl.arange(0, STRIDE)
            mask = (at < tile) & (begin + at < numel)
            tl.store(tensor + begin + at, _sum(bases, block, epoch, tensor, at, mask, WORLD, DATA, SLOTS, SLOT_BYTES), mask=mask)
    tl.store(epochs + block, epoch)


@triton.jit(do_not_specialize=["rank"])
def two_shot(
    tensor, bases, epochs, fault, limit_ns, numel, part,
    rank, WORLD: tl.constexpr, BLOCKS: tl.constexpr, DATA: tl.constexpr, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Sums `tensor`, of `numel` elements, in place: of each tile a rank sums a part of `part` elements and reads the others' sums of theirs."""
    block = tl.program_id(0)
    epoch = tl.load(epochs + block)
    tile = part * WORLD
    stride = tl.num_programs(0).to(tl.int64) * tile
    first = block.to(tl.int64) * tile
    limit_ns, fault = limit_ns.to(tl.int64), fault.to(tl.int64)
    if first < numel:
        _put(tensor, bases, first, tile, numel, block, epoch + 1, rank, DATA, SLOTS, SLOT_BYTES, STRIDE)
        _tell_all(bases, PUT, epoch + 1, block, rank, WORLD, BLOCKS)
    for begin in tl.range(first, tl.full((), numel, tl.int64), stride, num_stages=1):
        epoch += 1
        if begin + stride < numel:
            _put(tensor, bases, begin + stride, tile, numel, block, epoch + 1, rank, DATA, SLOTS, SLOT_BYTES, STRIDE)
            _tell_all(bases, PUT, epoch + 1, block, rank, WORLD, BLOCKS)
        _await_all(bases, PUT, epoch, block, fault, limit_ns, rank, WORLD, BLOCKS)
        _sum_part(tensor, bases, begin, part, numel, block, epoch, rank, WORLD, DATA, SLOTS, SLOT_BYTES, STRIDE)
        _tell_all(bases, SUMMED, epoch, block, rank, WORLD, BLOCKS)
        if begin > first:
            _await_all(bases, SUMMED, epoch - 1, block, fault, limit_ns, rank, WORLD, BLOCKS)
            _gather(tensor, bases, begin - stride, part, numel, block, epoch - 1, rank, WORLD, DATA, SLOTS, SLOT_BYTES, STRIDE)
        if begin + stride >= numel:
            _await_all(bases, SUMMED, epoch, block, fault, limit_ns, rank, WORLD, BLOCKS)
            _gather(tensor, bases, begin, part, numel, block, epoch, rank, WORLD, DATA, SLOTS, SLOT_BYTES, STRIDE)
    tl.store(epochs + block, epoch)


@triton.jit(do_not_specialize=["at", "fault", "limit_ns", "rank"])
def meet(bases, counts, at, fault, limit_ns, rank, WORLD: tl.constexpr):
    """Ends when all ranks have come to this call at flag number `at`. What each had done before on its stream, the others may read behind it.

    One block of one warp. `counts`: how often this rank has come to each flag, of which it has one a peer.
    """
    limit_ns, fault = limit_ns.to(tl.int64), fault.to(tl.int64)
    epoch = tl.load(counts + at) + 1
    tl.store(counts + at, epoch)
    for step in tl.static_range(1, WORLD):
        peer = (rank + step) % WORLD
        _tell(tl.load(bases + peer) + (at * WORLD + rank) * 8, epoch)
    for step in tl.static_range(1, WORLD):
        peer = (rank + step) % WORLD
        _await(tl.load(bases + rank) + (at * WORLD + peer) * 8, epoch, peer, fault, limit_ns)


@triton.jit
def add_up(mine, addresses, divisor, numel, WORLD: tl.constexpr, STRIDE: tl.constexpr):
    """Puts into `mine` the sum of the `numel` numbers at the address of each rank, its own among them, divided by `divisor`, a float64.

    `numel`: a whole multiple of 16, so that they are read 16 bytes at a time.
    """
    at = tl.program_id(0).to(tl.int64) * STRIDE + tl.arange(0, STRIDE)
    mask = at < numel
    total = _sum(addresses, 0, 0, mine, at, mask, WORLD, 0, 1, 0)
    if mine.dtype.element_ty == tl.float64:
        mean = total / tl.load(divisor)
    else:
        mean = tl.div_rn(total.to(tl.float32), tl.load(divisor).to(tl.float32)).to(mine.dtype.element_ty)
    tl.store(mine + at, mean, mask=mask)
