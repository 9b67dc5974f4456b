from pathlib import Path

import pytest

from hora.recipes.nmt import scoring
from hora.recipes.nmt.decoding.bleu import Bleu


def test_a_disk_that_refuses_translations_is_a_warning_and_a_wrong_place_is_none(tmp_path: Path, caplog, propagating_log) -> None:
    scoring._write(Path("/dev/full"), Bleu(1.0, "", ["a", "b"]))
    assert "translations could not be written into /dev/full: [Errno 28] No space left on device" in caplog.text
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        scoring._write(tmp_path / "file" / "trans.iter1.txt", Bleu(1.0, "", ["a"]))
