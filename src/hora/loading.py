"""Loads large modules sooner. Relies on nothing but the standard library."""

import gc
import importlib
import sys


def load(name: str) -> None:
    """Imports the module `name` while the interpreter looks for no garbage, nor ever after among what was made until then.

    Importing torch makes a million objects and next to no garbage; a third of its time is that search. What is made later is collected as always.

    Raises:
        ImportError: there is no such module, or it cannot be imported.
    """
    if name in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
