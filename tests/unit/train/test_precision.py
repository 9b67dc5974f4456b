import pytest
import torch

from hora.train.precision import float32_products


@pytest.mark.parametrize(("tf32", "word"), [(True, "tf32"), (False, "ieee")])
def test_products_are_set_inside_the_block_and_put_back_behind_it(tf32: bool, word: str) -> None:
    knobs = (torch.backends.cudnn.rnn, torch.backends.cudnn.conv, torch.backends.cuda.matmul)
    before = [knob.fp32_precision for knob in knobs]
    with float32_products(tf32=tf32):
        assert [knob.fp32_precision for knob in knobs] == [word] * 3
    assert [knob.fp32_precision for knob in knobs] == before
