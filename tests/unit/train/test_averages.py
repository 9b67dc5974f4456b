import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hora.train.averages import WeightAverage


@pytest.mark.parametrize("decay", [None, 0.75])
def test_average_is_that_of_torch(decay):
    model = torch.nn.Linear(3, 2)
    ours = WeightAverage(model, decay)
    theirs = AveragedModel(model, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))
    for _ in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        ours.update()
        theirs.update_parameters(model)
    with ours.swapped_in():
        for found, expected in zip(model.parameters(), theirs.module.parameters(), strict=True):
            torch.testing.assert_close(found, expected)


def test_own_weights_come_back_in_the_same_memory_also_after_an_error():
    model = torch.nn.Linear(3, 2)
    average = WeightAverage(model)
    average.update()
    with torch.no_grad():
        model.weight.add_(1)
    before, place = model.weight.clone(), model.weight.data_ptr()
    with pytest.raises(KeyError), average.swapped_in():
        assert not torch.equal(model.weight, before)
        raise KeyError
    assert torch.equal(model.weight, before)
    assert model.weight.data_ptr() == place


def test_without_an_update_there_is_nothing_to_swap():
    model = torch.nn.Linear(3, 2)
    average = WeightAverage(model)
    with torch.no_grad():
        model.weight.add_(1)
    before = model.weight.clone()
    with average.swapped_in():
        assert torch.equal(model.weight, before)


def test_state_goes_on():
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    one, other = (WeightAverage(model, 0.5) for model in models)
    one.update()
    with torch.no_grad():
        models[0].weight.zero_()
    one.update()
    other.load_state_dict(one.state_dict())
    with one.swapped_in(), other.swapped_in():
        assert torch.equal(models[0].weight, models[1].weight)
    assert other.num_updates == 2
