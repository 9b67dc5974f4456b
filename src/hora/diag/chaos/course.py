"""Makes the trials that were asked for, one after the other, and puts each on the board as soon as it has ended."""

from collections.abc import Callable, Sequence

from hora.diag.chaos import disk, restarts, soak, stops, wrong
from hora.diag.chaos.board import Board, Trial
from hora.diag.chaos.scenario import Ground, Outcome, Run, Scenario
from hora.diag.chaos.trial import ChaosError
from hora.errors import ConfigError


def scenarios(soak_minutes: float | None = None) -> list[Scenario]:
    """All that can be made on this machine, in the order of their names."""
    found = [*restarts.SCENARIOS, *stops.SCENARIOS, *disk.SCENARIOS, *wrong.SCENARIOS]
    if not disk.can_trace():
        found = [scenario for scenario in found if scenario.name != "F8"]
    if soak_minutes is not None:
        found.append(soak.scenario(soak_minutes))
    return sorted(found, key=lambda scenario: int(scenario.name.removeprefix("F")))


def choose(names: Sequence[str], known: Sequence[Scenario], *, quick: bool) -> list[Scenario]:
    """Those of `names`; without names all of them, or the quick ones.

    Raises:
        ConfigError: one is not known.
    """
    by_name = {scenario.name: scenario for scenario in known}
    for name in names:
        if name not in by_name:
            raise ConfigError(f'unknown scenario "{name}"; choose from: {", ".join(by_name)}')
    return [by_name[name] for name in names] or [scenario for scenario in known if scenario.quick or not quick]


def make_trials(
    ground: Ground, board: Board, chosen: Sequence[Scenario], repeats: int, first_seed: int, *, peers: bool, tell: Callable[[str], None]
) -> None:
    """Makes the trials that the board has not, `repeats` of each scenario, and as many with torchrun where `peers` are wanted."""
    for scenario in chosen:
        runs: list[tuple[str, Run]] = [("hora", scenario.run)]
        if peers and scenario.peer is not None:
            runs.append(("torchrun", scenario.peer))
        for launcher, run in runs:
            for seed in range(first_seed, first_seed + min(repeats, scenario.most)):
                if board.has(scenario.name, launcher, seed):
                    continue
                draw = scenario.draw(seed)
                tell(f"{scenario.name} with {launcher}, seed {seed} {draw.variant}")
                outcome = _attempt(lambda run=run, draw=draw: run(ground, draw))  # type: ignore[misc]
                board.add(Trial(scenario.name, launcher, draw.variant, seed, dict(outcome.numbers), outcome.problems))


def _attempt(run: Callable[[], Outcome]) -> Outcome:
    """A trial that cannot be made to its end has not passed."""
    try:
        return run()
    except ChaosError as error:
        return Outcome({}, [str(error).splitlines()[0]])
