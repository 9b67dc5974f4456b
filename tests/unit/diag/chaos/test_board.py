"""The scoreboard keeps trials, and makes none twice."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hora.cli.main import main
from hora.diag.chaos import board, course
from hora.diag.chaos.board import Board, Result
from hora.diag.chaos.scenario import Draw, Ground, Outcome, Scenario
from hora.diag.chaos.trial import ChaosError
from hora.errors import ConfigError

HORA = [Result("F1", "hora", "rank 0", seed, {"detected_s": 0.1 * seed, "lost_steps": 5.0}) for seed in range(1, 21)]


def scenario(*, problems: list[str] | None = None, fails: bool = False) -> tuple[Scenario, list[Draw]]:
    made: list[Draw] = []

    def run(_: Ground, draw: Draw) -> Outcome:
        made.append(draw)
        if fails:
            raise ChaosError("waited in vain for update 3:\nmuch text")
        return Outcome({"lost_steps": float(draw.random.randrange(100))}, problems or [])

    return Scenario("F1", "a fault", run, ("one", "two"), peer=run, most=3), made


def make(path: Path | None, chosen: Scenario, **others: object) -> Board:
    kept = Board(path, "hora chaos")
    course.make_trials(Ground(Path()), kept, [chosen], **{"repeats": 2, "first_seed": 0, "peers": False, "tell": lambda _: None, **others})  # type: ignore[arg-type]
    return kept


def test_finished_trials_are_kept_and_not_made_again(tmp_path: Path) -> None:
    chosen, made = scenario()
    make(tmp_path / "chaos.json", chosen)
    assert [(draw.seed, draw.variant) for draw in made] == [(0, "one"), (1, "two")]
    again = make(tmp_path / "chaos.json", chosen, repeats=9, peers=True)
    assert [draw.seed for draw in made[2:]] == [2, 0, 1, 2]
    assert [(trial.launcher, trial.seed) for trial in again.trials] == [
        ("hora", 0), ("hora", 1), ("hora", 2), ("torchrun", 0), ("torchrun", 1), ("torchrun", 2),
    ]  # fmt: skip


def test_a_seed_makes_the_same_trial() -> None:
    drawn = [make(None, scenario()[0], first_seed=seed).trials[0].numbers for seed in (4, 4, 6)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_trial_that_does_not_come_to_its_end_has_not_passed() -> None:
    assert make(None, scenario(fails=True)[0]).trials[0].problems == ["waited in vain for update 3:"]


def test_rows_hold_what_was_measured_with_machine_and_command(tmp_path: Path) -> None:
    kept = Board(tmp_path / "chaos.json", "hora chaos F1")
    for trial in HORA:
        kept.add(trial)
    rows = {row["what"]: row for row in json.loads((tmp_path / "chaos.json").read_text())}
    assert rows["chaos.F1.hora/detected_s"]["value"] == pytest.approx(1.05)
    assert rows["chaos.F1.hora/detected_s p95"]["value"] == pytest.approx(1.9)
    assert (rows["chaos.F1.hora/passed"]["value"], rows["chaos.F1.hora/passed"]["unit"]) == (20, "of 20 trials")
    assert all(row.keys() >= {"machine", "versions", "command", "commit", "samples", "ranks", "unit"} for row in rows.values())


def test_trials_of_another_machine_are_not_mixed_in(tmp_path: Path) -> None:
    Board(tmp_path / "chaos.json", "hora chaos").add(HORA[0])
    rows = json.loads((tmp_path / "chaos.json").read_text())
    for row in rows:
        row["machine"] = "another"
    (tmp_path / "chaos.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match="holds trials of another machine"):
        Board(tmp_path / "chaos.json", "hora chaos")
    for text in ("[3]", "[" * 100_000):
        (tmp_path / "chaos.json").write_text(text)
        with pytest.raises(ConfigError, match="it holds none"):
            Board(tmp_path / "chaos.json", "hora chaos")


def test_tables_say_what_passed_and_what_did_not(tmp_path: Path) -> None:
    kept = Board(None, "hora chaos")
    kept.trials = [*HORA, Result("F1", "torchrun", "rank 0", 7, {}, ["2 processes go on"])]
    chosen = scenario()[0]
    shown = "\n".join(board.lines(kept, [chosen]))
    assert re.search(r"F1 +hora +20/20  a fault\n +noticed after 1.05, p95 1.9 s\n +updates lost 5, p95 5", shown)
    assert "WRONG seed 7 (rank 0): 2 processes go on" in shown
    table = list(board.markdown(kept, [chosen], "chaos"))
    assert table[0] == "| | fault | with | passed | noticed after | updates lost |"
    assert '<!--row chaos what="chaos.F1.hora/detected_s p95"-->1.90<!--/row--> s' in table[2]
    assert table[3].endswith('of <!--row chaos what="chaos.F1.torchrun/trials"-->1<!--/row--> |  |  |')


def test_scenarios_are_chosen_by_name_or_by_how_long_they_take() -> None:
    known, with_soak = course.scenarios(), course.scenarios(soak_minutes=5)
    assert [each.name for each in with_soak] == [f"F{number}" for number in range(1, 25) if number != 23]
    assert [each.name for each in course.choose(["F12", "F1"], known, quick=True)] == ["F12", "F1"]
    assert [each.name for each in course.choose([], known, quick=True)] == ["F1", "F10", "F12"]
    assert course.choose([], with_soak, quick=False) == with_soak
    # Who says how long the soak is to take wants it.
    assert [each.name for each in course.choose([], with_soak, quick=True)] == ["F1", "F10", "F12", "F24"]
    assert [each.name for each in course.choose(["F24"], with_soak, quick=True)] == ["F24"]
    with pytest.raises(ConfigError, match="how long is F24 to take"):
        course.choose(["F24"], known, quick=True)
    with pytest.raises(ConfigError, match='unknown scenario "F99"; choose from: F1, '):
        course.choose(["F99"], known, quick=True)


def test_what_a_machine_lacks_something_for_is_skipped_with_the_reason_and_counts_for_nothing(tmp_path: Path) -> None:
    chosen, made = scenario()
    chosen = replace(chosen, lacks=lambda variant: "there is no strace: install it" if variant == "two" else "")
    kept = make(tmp_path / "chaos.json", chosen, repeats=3)
    assert [draw.variant for draw in made] == ["one", "one"]
    shown = list(board.lines(kept, [chosen]))
    assert shown[0].split()[:3] == ["F1", "hora", "2/2"]
    assert shown[-1].split(maxsplit=2)[1:] == ["skipped", "two: there is no strace: install it"]
    assert list(course.listing([chosen])) == ["F1   a fault", "     skipped here: two: there is no strace: install it"]
    assert Board(tmp_path / "chaos.json", "hora chaos").skipped == []


def test_a_run_in_which_nothing_could_be_made_has_not_passed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = replace(scenario()[0], lacks=lambda _: "no right to mount: be root")
    monkeypatch.setattr(course, "scenarios", lambda _: [chosen])
    assert main(["chaos", "F1"]) == 1
    assert "skipped  one: no right to mount: be root" in capsys.readouterr().out
