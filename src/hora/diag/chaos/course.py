"""Makes the trials that were asked for, one after the other, and puts each on the board as soon as it has ended."""

import subprocess
from collections.abc import Callable, Iterator, Sequence

from hora.diag.chaos import clock, data, disk, files, machine, replicas, restarts, saving, slow, soak, stops, wires, wrong
from hora.diag.chaos.board import Board, Result, Skipped
from hora.diag.chaos.scenario import Ground, Outcome, Run, Scenario
from hora.diag.chaos.trial import ChaosError
from hora.errors import ConfigError


def scenarios(soak_minutes: float | None = None) -> list[Scenario]:
    """All there are, in the order of their names; some may lack something on this machine (`Scenario.lacks`)."""
    modules = (restarts, stops, disk, wrong, slow, saving, replicas, machine, wires, data, files, clock)
    found = [scenario for module in modules for scenario in module.SCENARIOS]
    if soak_minutes is not None:
        found.append(soak.scenario(soak_minutes))
    return sorted(found, key=lambda scenario: int(scenario.name.removeprefix("F")))


def listing(known: Sequence[Scenario]) -> Iterator[str]:
    """A line for each scenario, and what is lacking here for it."""
    for scenario in known:
        mark = " (quick)" if scenario.quick else " (with --soak MINUTES)" if scenario.name == soak.NAME else ""
        yield f"{scenario.name:4} {scenario.fault}{mark}"
        reasons = {variant: lacks for variant in scenario.variants if (lacks := scenario.lacks(variant))}
        for lacks in dict.fromkeys(reasons.values()):
            which = ", ".join(variant for variant, reason in reasons.items() if reason == lacks)
            yield f"{'':4} skipped here: {which}{': ' if which else ''}{lacks}"


def choose(names: Sequence[str], known: Sequence[Scenario], *, quick: bool) -> list[Scenario]:
    """Those of `names`; without names all of them, or the quick ones. The soak, which is among `known` if it was asked for, is added.

    Raises:
        ConfigError: one is not known.
    """
    by_name = {scenario.name: scenario for scenario in known}
    for name in names:
        if name == soak.NAME and name not in by_name:
            raise ConfigError(f"how long is {name} to take? Say so with --soak MINUTES")
        if name not in by_name:
            raise ConfigError(f'unknown scenario "{name}"; choose from: {", ".join(by_name)}')
    chosen = [by_name[name] for name in names] or [scenario for scenario in known if scenario.quick or not quick]
    return chosen + [scenario for scenario in known if scenario.name == soak.NAME and scenario not in chosen]


def make_trials(
    ground: Ground, board: Board, chosen: Sequence[Scenario], repeats: int, first_seed: int, *, peers: bool, tell: Callable[[str], None]
) -> None:
    """Makes the trials that the board has not, `repeats` of each scenario, and as many with torchrun where `peers` are wanted.

    What this machine lacks something for is put on the board as skipped.
    """
    for scenario in chosen:
        runs: list[tuple[str, Run]] = [("hora", scenario.run)]
        if peers and scenario.peer is not None:
            runs.append(("torchrun", scenario.peer))
        for launcher, run in runs:
            for seed in range(first_seed, first_seed + min(repeats, scenario.most)):
                if board.has(scenario.name, launcher, seed):
                    continue
                draw = scenario.draw(seed)
                if lacks := scenario.lacks(draw.variant):
                    board.skip(Skipped(scenario.name, draw.variant, lacks))
                    continue
                tell(f"{scenario.name} with {launcher}, seed {seed} {draw.variant}")
                outcome = _attempt(lambda run=run, draw=draw: run(ground, draw))  # type: ignore[misc]
                board.add(Result(scenario.name, launcher, draw.variant, seed, dict(outcome.numbers), outcome.problems))


def _attempt(run: Callable[[], Outcome]) -> Outcome:
    """A trial that cannot be made to its end has not passed."""
    try:
        return run()
    except (ChaosError, OSError, subprocess.SubprocessError) as error:
        return Outcome({}, [str(error).splitlines()[0]])
