"""All-reduce between two nodes on a slow network: `hierarchical` beside Gloo's own, in the same run, in turns.

    sudo benchmarks/two_nodes.sh benchmarks/results/hierarchical.json [--rounds 9] [--sizes-mib 1 64]

starts this script on two network namespaces of two ranks each, joined by a cable of 1 Gbit/s; on real nodes `hora run` starts it. Prints a table
and writes a row for each size and algorithm; the value is the median over the rounds of the time of a call, in milliseconds.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import hora
from hora.diag.bench.registry import Workload
from hora.diag.bench.rows import rows, write_rows

MIB = 1 << 20


def timed(call: Callable[[], object], calls: int) -> float:
    """Mean time of a call in milliseconds, the ranks beginning together; a barrier ends it, so that the slowest rank counts."""
    hora.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    hora.barrier()
    return (time.perf_counter() - begin) / calls * 1e3


def workload_of(size_mib: int, options: argparse.Namespace) -> Workload:
    """An all-reduce of that size under each algorithm; what is compared with is the first."""
    nodes = [record.node_rank for record in hora.session().records]
    placed = "by-node" if nodes == sorted(nodes) else "in-turns"
    workload = Workload(f"hierarchical.{placed}.{size_mib}MiB", "one all_reduce", "ms", hora.world_size())
    tensor = torch.ones(size_mib * MIB // 4)
    for algorithm in options.algorithms:
        call = partial(hora.all_reduce, tensor, algorithm=algorithm)
        workload.variant(algorithm)(partial(timed, call, max(1, 16 // size_mib)))
    return workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--algorithms", nargs="+", default=["native", "hierarchical", "ring"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--command", default="", help="what started all this, for the rows")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hora.init()
    measurements = []
    for size in options.sizes_mib:
        workload = workload_of(size, options)
        measured = workload.measure(options.rounds)
        measurements += measured
        for each in measured if hora.rank() == 0 else ():
            print(f"{workload.name}  {each.variant:14} {each.median:8.1f} ms  {measured[0].median / each.median:5.2f}x", flush=True)
    if hora.rank() == 0 and options.json:
        write_rows(options.json, rows(measurements, shlex.split(options.command) or sys.argv))
    hora.shutdown()


if __name__ == "__main__":
    main()
