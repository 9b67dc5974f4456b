"""The kernel that copies many tensors into one and finds the largest magnitude of each, in Triton."""

import triton
import triton.language as tl


@triton.jit
def copy_and_look(flat, largest, chunks, sources, CHUNK: tl.constexpr):
    """Each program copies a chunk of one of `sources` into `flat`, and raises that source's number of `largest` to its largest magnitude.

    `largest`: the bits of float32, in which what is no number is larger than any. `chunks`: for each program the number of its source, the first
    element there, the first in `flat`, and how many; sources, and where they go, begin at multiples of 16 bytes.
    """
    row = chunks + tl.program_id(0).to(tl.int64) * 4
    number = tl.load(row)
    address = sources[0].to(tl.int64)
    for other in tl.static_range(1, len(sources)):
        address = tl.where(number == other, sources[other].to(tl.int64), address)
    begin = tl.multiple_of(tl.load(row + 1), 16)
    place = tl.multiple_of(tl.load(row + 2), 128 // flat.dtype.element_ty.primitive_bitwidth)
    source = tl.multiple_of(address.to(tl.pointer_type(flat.dtype.element_ty)), 16) + begin
    count = tl.load(row + 3)
    at = tl.arange(0, CHUNK)
    if count == CHUNK:  # no mask, so that 16 bytes are read at a time
        values = tl.load(source + at)
        tl.store(flat + place + at, values)
    else:
        values = tl.load(source + at, mask=at < count, other=0.0)
        tl.store(flat + place + at, values, mask=at < count)
    bits = values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(largest + number, tl.max(bits, 0), sem="relaxed")
