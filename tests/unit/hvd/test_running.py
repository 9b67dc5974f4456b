"""`horovod.run`: what it refuses, before anything is started."""

import pytest

from hora.errors import ConfigError
from hora.hvd import run
from hora.hvd.settings import log_level_from
from hora.launch import travel


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"func": lambda: None}, "a lambda has none"),
        ({"func": travel.travelling, "hosts": "198.51.100.7:4"}, "198.51.100.7 is another; give a script to `horarun -H`"),
        ({"func": travel.travelling, "np": 3, "hosts": "localhost:2"}, "3 ranks need as many slots, but the hosts have 2"),
        ({"func": travel.travelling, "hosts": "localhost:2", "hostfile": "x"}, "hosts and hostfile contradict each other"),
        (
            {"func": travel.travelling, "min_np": 1, "executable": "/bin/sh"},
            "min_np: ranks of a function.*; executable: ranks run the Python",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments, answer):
    with pytest.raises(ConfigError, match=answer):
        run(**arguments)


def test_an_unknown_argument_is_pythons_own_mistake():
    with pytest.raises(TypeError, match="no argument num_procs"):
        run(travel.travelling, num_procs=2)


def test_levels_of_horovod_are_those_of_python():
    assert [log_level_from({"HOROVOD_LOG_LEVEL": name}) for name in ("TRACE", "debug", "WARNING", "FATAL", "")] == [1, 10, 30, 50, None]
    with pytest.raises(ConfigError, match="HOROVOD_LOG_LEVEL must be one of TRACE, .* but is 'LOUD'"):
        log_level_from({"HOROVOD_LOG_LEVEL": "LOUD"})
