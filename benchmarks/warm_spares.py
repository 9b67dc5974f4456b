"""How soon a job trains again after kill -9 of a rank: its ranks started anew, and taken from spares, in turns in the same run.

    python benchmarks/warm_spares.py --json benchmarks/results/warm-spares.json [--rounds 5]

Two ranks run the small network of `hora chaos` with a checkpoint every five updates. The time is that from the signal to the first update that is
further than the job had come before. With spares the rank is killed once they are ready. Prints a table and writes a row for each variant.
"""

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from hora.diag.bench.registry import Workload
from hora.diag.bench.rows import rows, write_rows
from hora.diag.chaos.journal import Event, named, recovery
from hora.diag.chaos.settings import Settings
from hora.diag.chaos.trial import job

VARIANTS = {"started anew": (), "spares": ("--warm-spares", "--verbose")}


def training_again_s(*flags: str) -> float:
    """One job, from the death of its rank 1 to its going further."""
    with (
        tempfile.TemporaryDirectory(prefix="hora-warm-") as directory,
        job(Settings(directory, steps=1_000_000), "--max-restarts", "1", *flags) as trial,
    ):

        def under_way(events: list[Event]) -> bool:
            ready = not flags or trial.heard_at("spares for 2 ranks are ready") is not None
            return ready and any(event.done >= 10 for event in named(events, "step"))

        (victim,) = (event.fields["pid"] for event in named(trial.wait_for("updates", under_way), "begin") if event.rank == 1)
        struck_s = time.monotonic()
        trial.strike(victim, signal.SIGKILL)
        further = trial.wait_for("further updates", lambda events: "recovered_s" in recovery(events, struck_s))
        return recovery(further, struck_s)["recovered_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    workload = Workload("warm_spares.training_again", "kill -9 of a rank", "s", 2)
    for name, flags in VARIANTS.items():
        workload.variant(name)(lambda flags=flags: training_again_s(*flags))
    measurements = workload.measure(options.rounds)
    for measurement in measurements:
        print(f"{measurement.variant:14} {measurement.median:6.2f} s  of {sorted(round(sample, 2) for sample in measurement.samples)}")
    if options.json:
        write_rows(options.json, rows(measurements, ["python", *sys.argv]))


if __name__ == "__main__":
    main()
