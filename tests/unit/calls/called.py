"""Functions that the tests of `hora.run` call on ranks."""

import os
import signal
import sys
import time
from dataclasses import dataclass

import torch

import hora


@dataclass
class Point:
    x: int
    where: torch.Tensor


def everything(value, *, scale):
    hora.init()
    total = hora.all_reduce(torch.ones(2))
    print("hello from", hora.rank())
    print("beware", file=sys.stderr)
    return {"rank": hora.rank(), "total": total, "value": value, "scaled": Point(scale, value["where"] * scale), 3: (None, b"\xff")}


def fail_on_one():
    if os.environ["RANK"] == "1":
        raise ValueError("no such number")
    time.sleep(600)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    sys.exit(0)


def return_what_cannot_travel():
    return {"made": object()}


def wait(path):
    with open(f"{path}/{os.environ['RANK']}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{path}/{os.environ['RANK']}", f"{path}/pid{os.environ['RANK']}")
    time.sleep(600)


class Holder:
    @staticmethod
    def inside():
        return 1

    def method(self):
        return 2


def replaced():
    return 1


original, replaced = replaced, lambda: 2
