import pytest

from hora.diag.prove.request import Request, parse_ranks, with_ranks
from hora.errors import ConfigError


def test_ranks_and_quotients_are_put_into_words() -> None:
    request = Request(("train.py", "--gpus={ranks}", "--batch", "{64/ranks}", "{96 / ranks}x{ranks}", "{other}"), ranks=(1, 4))
    assert request.words_for(4) == ["train.py", "--gpus=4", "--batch", "16", "24x4", "{other}"]
    assert request.launcher_for(4) is None
    assert Request(("a.py",), launcher="torchrun -n {ranks}").launcher_for(2) == "torchrun -n 2"


@pytest.mark.parametrize(("word", "ranks"), [("{64/ranks}", 3), ("{2/ranks}", 4), ("{0/ranks}", 1)])
def test_quotient_that_is_no_whole_number_is_refused(word: str, ranks: int) -> None:
    with pytest.raises(ConfigError, match="must be a whole number for each number of ranks"):
        with_ranks(word, ranks)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Request(("a.py", "{8/ranks}"), ranks=(1, 3), steps=0, timeout_s=0.0, exact=True, launcher="torchrun")
    said = str(caught.value)
    assert all(part in said for part in ("--steps", "--timeout", "--exact needs Hora's own launcher", "{8/ranks}"))


def test_ranks_are_read() -> None:
    assert parse_ranks("1,2, 4") == (1, 2, 4)
    assert parse_ranks("3,1") == (3, 1)


@pytest.mark.parametrize("text", ["", "1", "1,1", "0,2", "1,two", "1,-2", "2,2,4", "1,²"])
def test_ranks_that_cannot_be_compared_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--ranks must be two different numbers"):
        parse_ranks(text)
