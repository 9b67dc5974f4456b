"""Many ranks and agents on one machine meet, and within the deadlines that everything has; how fast is `benchmarks/many.py`."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_64_ranks_and_512_agents_meet(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / "many.py"), "--rounds", "1", "--json", str(tmp_path / "rows.json")]
    subprocess.run(words, check=True, timeout=90, cwd=tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [(row["what"], row["ranks"]) for row in rows] == [("many.ranks start, meet and end/hora", 64), ("many.agents meet/hora", 512)]
    assert all(0 < row["value"] < 60 for row in rows)
