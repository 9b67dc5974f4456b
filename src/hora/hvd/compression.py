"""What gradients travel as: as they are, or in half the bytes or less."""

import warnings
from typing import ClassVar

import torch
from torch import Tensor


class Compressor:
    """Makes a tensor small for the way, and large again."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """The tensor to send, and what `decompress` must know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """The tensor in its own type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """`tensor` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:  # noqa: ARG004 (as others)
        """`tensor` itself."""
        return tensor


class _HalfCompressor(Compressor):
    dtype: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """`tensor` in half precision, if it is a larger floating-point one."""
        if tensor.is_floating_point() and tensor.dtype.itemsize > 2:
            return tensor.to(cls.dtype), tensor.dtype
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """`tensor` in the type that it had."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_HalfCompressor):
    """Sends float16, which holds at most 65504; that a value or a sum went beyond is warned of."""

    dtype = torch.float16

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """`tensor` in the type that it had; warns where it is not finite, and on a GPU waits to see that."""
        if ctx is not None and not bool(tensor.isfinite().all()):
            warnings.warn(
                "a tensor sent as float16 came back with values that are not finite: float16 holds at most 65504. Use Compression.bf16, which "
                "has the range of float32, or a GradScaler, which leaves out such an update",
                RuntimeWarning,
                stacklevel=2,
            )
        return super().decompress(tensor, ctx)


class BF16Compressor(_HalfCompressor):
    """Sends bfloat16, which has the range of float32 and 8 bits of precision."""

    dtype = torch.bfloat16


class Compression:
    """The ways to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
