"""`hora bench allreduce`: what an all-reduce takes, by size, backend, algorithm and number of ranks, beside what the memory or the wire allows.

`command` is what the user calls, `request` what was asked for, `measure` is what they do, in `teams`, with `work`; `rows`,
`table` and `picture` show it, `choices` makes the table of algorithm "auto" of it.
"""
