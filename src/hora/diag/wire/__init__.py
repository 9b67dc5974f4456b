"""`hora bench allreduce`: what an all-reduce takes, by size, backend, algorithm and number of ranks, beside what the memory or the wire allows.

`request` is what was asked for, `start` starts the ranks, `measure` is what they do, `rows`, `table` and `picture` show it, `save` makes the table
of algorithm "auto" of it.
"""
