import pytest
import torch
import torch.nn.functional as F

from hora.plan.seeds import derive_key, seed_at
from hora.recipes.image.augment import augment, normalise, seeds_at
from hora.recipes.image.scores import Score, count_correct
from hora.recipes.meter import Tally


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1, derive_key("augmentation", 3, 5)])
def test_seeds_of_a_batch_are_those_of_the_plan(key: int) -> None:
    positions = torch.tensor([0, 1, 2, 59_999, 2**40])
    expected = [seed_at(key, position) for position in positions.tolist()]
    assert [seed % 2**64 for seed in seeds_at(key, positions).tolist()] == expected


def crop_one(image: torch.Tensor, seed: int, padding: int, flip: bool) -> torch.Tensor:
    """One image, written down a second time."""
    down, across, mirrored = (seed & 0xFFFF) * (2 * padding + 1) >> 16, (seed >> 16 & 0xFFFF) * (2 * padding + 1) >> 16, seed >> 32 & 0x8000
    _, height, width = image.shape
    cut = F.pad(image, (padding,) * 4)[:, down : down + height, across : across + width]
    return cut.flip(2) if flip and mirrored else cut


@pytest.mark.parametrize(("padding", "flip"), [(0, False), (4, False), (0, True), (2, True)])
def test_batch_is_augmented_as_its_images_one_by_one(padding: int, flip: bool) -> None:
    images = torch.randint(256, (40, 3, 7, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seeds = seeds_at(9, torch.arange(40))
    made = augment(images, seeds, padding=padding, flip=flip)
    expected = torch.stack([crop_one(image, seed % 2**64, padding, flip) for image, seed in zip(images, seeds.tolist(), strict=True)])
    assert made.dtype == torch.uint8
    assert torch.equal(made, expected)
    assert (padding == 0 and not flip) or not torch.equal(made, images)


def test_image_looks_the_same_wherever_it_is_in_a_batch() -> None:
    images, seeds = torch.randint(256, (9, 1, 8, 8), dtype=torch.uint8), seeds_at(4, torch.arange(9))
    order = torch.tensor([5, 0, 8])
    whole = augment(images, seeds, padding=2, flip=True)
    assert torch.equal(augment(images[order], seeds[order], padding=2, flip=True), whole[order])


def test_all_crops_and_both_sides_come_up() -> None:
    image = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    image[0, 0, 4, 2] = 1
    made = augment(image.expand(4000, -1, -1, -1), seeds_at(1, torch.arange(4000)), padding=1, flip=True)
    counts = made.float().sum((0, 1))
    found = counts[counts > 0]
    assert len(found) == 3 * 6  # three rows; columns 1 to 3, and 5 to 7 mirrored
    assert found.sum() == 4000
    assert 0.75 * 4000 / 18 < found.min() < found.max() < 1.25 * 4000 / 18


def test_normalised_pixels_have_mean_zero_and_deviation_one() -> None:
    images = torch.randint(256, (50, 2, 8, 8), dtype=torch.uint8)
    values = images.double()
    made = normalise(images, values.mean((0, 2, 3))[:, None, None], values.std((0, 2, 3), correction=0)[:, None, None])
    assert made.mean((0, 2, 3)).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert made.std((0, 2, 3), correction=0).tolist() == pytest.approx([1, 1])


def test_counts_are_those_of_a_stable_sort() -> None:
    logits = torch.randint(4, (200, 9), generator=torch.Generator().manual_seed(0)).float()  # many ties
    labels = torch.randint(9, (200,), generator=torch.Generator().manual_seed(1))
    ranked = logits.sort(dim=1, descending=True, stable=True).indices
    expected = [(ranked[:, 0] == labels).sum().item(), (ranked[:, :5] == labels[:, None]).sum().item()]
    assert count_correct(logits, labels).tolist() == expected


def test_with_fewer_than_five_classes_all_are_among_five() -> None:
    assert count_correct(torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2]))[1] == 6


def test_scores_add_up() -> None:
    score = Score(Tally(6.0, 4), 2, 3) + Score(Tally(4.0, 1), 1, 1)
    assert (score.loss, score.top1, score.top5) == (2.0, 0.6, 0.8)
    assert Score().top1 != Score().top1  # no number of nothing
