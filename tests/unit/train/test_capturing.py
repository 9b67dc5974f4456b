"""What goes on around the capture of a step; captures themselves are tested on GPUs."""

import gc
import weakref

import pytest

from hora.train.step.graph import nothing_collected


class Ring:
    def __init__(self) -> None:
        self.next = self


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_inside_and_as_before_behind(collects: bool) -> None:
    before, threshold = gc.isenabled(), gc.get_threshold()
    try:
        (gc.enable if collects else gc.disable)()
        gc.set_threshold(1, 1, 1)
        with pytest.raises(ValueError, match="capture"), nothing_collected():
            dead = weakref.ref(Ring())
            kept = [[number] for number in range(1000)]
            assert dead() is not None, len(kept)
            raise ValueError("a capture that fails")
        assert gc.isenabled() == collects
    finally:
        gc.set_threshold(*threshold)
        (gc.enable if before else gc.disable)()
