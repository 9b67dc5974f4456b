"""Loss and accuracy, measured by all ranks together and equal to what one process measures: each image is looked at exactly once."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hora.comm.collectives import all_reduce
from hora.comm.session import session
from hora.recipes.image.augment import normalise
from hora.recipes.image.data import ImageLoader
from hora.recipes.image.scores import Score, count_correct
from hora.recipes.meter import Meter
from hora.train.precision import autocast
from hora.train.step.tree import to_device


class Preparation(nn.Module):
    """What turns bytes into what a network is given.

    Args:
        mean, deviation: of each channel.
        channels_last: whether images are laid out pixel by pixel.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: tuple[float, ...], deviation: tuple[float, ...], *, channels_last: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("deviation", torch.tensor(deviation)[:, None, None])
        self._format = torch.channels_last if channels_last else torch.contiguous_format

    def forward(self, images: Tensor) -> Tensor:
        """Bytes `[batch, channels, height, width]` as normalised float32."""
        return normalise(images, self.mean, self.deviation).contiguous(memory_format=self._format)


@torch.no_grad()
def evaluate(model: nn.Module, prepare: Preparation, loader: ImageLoader, *, precision: str) -> Score:
    """Looks at all images of `loader` with the model as it is, without dropout, and leaves it in training mode. Collective.

    Raises:
        NonFiniteLoss: the model gives no finite likelihood.
    """
    device = session().device
    meter, correct = Meter(device), torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for step in loader:
        for batch, logical_rank in zip(step, step.logical_ranks, strict=True):
            images, labels, _ = to_device(batch, device)
            with autocast(device, precision):
                logits = model(prepare(images)).float()
            meter.add(F.cross_entropy(logits, labels, reduction="sum"), len(labels), step.index, logical_rank)
            correct += count_correct(logits, labels)
    model.train()
    top1, top5 = all_reduce(correct).tolist()
    return Score(meter.collect(), int(top1), int(top5))
