"""Many ranks and agents on one machine: how long a job of ranks that load no torch takes to start, to meet and to end, and so many clients to meet.

    python benchmarks/many.py --json benchmarks/results/many.json [--ranks 64] [--agents 512] [--rounds 5]

Each rank and each agent sets a key of its own and waits for those of all others.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from hora.diag.bench.registry import Measurement, Workload
from hora.diag.bench.rows import rows, write_rows
from hora.rendezvous.client import Client
from hora.rendezvous.key import new_key
from hora.rendezvous.server import Server

RANK = """\
import os
from hora.rendezvous.client import Client
from hora.rendezvous.key import read_key
with Client(os.environ["HORA_RENDEZVOUS"], read_key(os.environ["HORA_KEY_FILE"]), name="rank", timeout_s=60) as client:
    client.set("here/" + os.environ["RANK"], b"")
    client.multi_get([f"here/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))])
"""


def ranks_meet(count: int, directory: Path) -> float:
    """Seconds of `hora run -np COUNT`, from its start to its end."""
    script = directory / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "hora", "run", "--quiet", "-np", str(count), str(script)], check=True, timeout=120, cwd=directory)
    return time.perf_counter() - begun


def agents_meet(count: int, directory: Path) -> float:
    """Seconds until `count` clients, each a thread, have met at one server and left."""
    key, went = new_key(), []

    def agent(number: int) -> None:
        with Client(server.address, key, name=f"agent {number}", timeout_s=60.0) as client:
            client.set(f"here/{number}", b"")
            went.append(len(client.multi_get([f"here/{other}" for other in range(count)])))

    with Server(f"unix://{directory}/rendezvous.sock", key).start() as server:
        agents = [threading.Thread(target=agent, args=(number,)) for number in range(count)]
        begun = time.perf_counter()
        for thread in agents:
            thread.start()
        for thread in agents:
            thread.join()
        seconds = time.perf_counter() - begun
    if went != [count] * count:
        raise SystemExit(f"{count} agents must meet, but only {len(went)} did")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--agents", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    measurements = []
    for name, act, count in (("many.ranks start, meet and end", ranks_meet, args.ranks), ("many.agents meet", agents_meet, args.agents)):
        samples = []
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as directory:
                samples.append(act(count, Path(directory)))
        measurements.append(Measurement(Workload(name, "one job", "s", count), "hora", tuple(samples)))
        print(f"{count} {name.partition('.')[2]}: {measurements[-1].median:.2f} s ({min(samples):.2f} to {max(samples):.2f})")
    if args.json:
        write_rows(args.json, rows(measurements, ["python", *sys.argv]))


if __name__ == "__main__":
    main()
