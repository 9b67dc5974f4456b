"""Where the time of a training step goes: recorded on each rank, compared over the ranks, told in a table and a sentence.

`recorder` keeps the marks of steps (`hora.events`) with their times, `device` those of a GPU; `slices` and `rank_record` make parts of a step of
them, `compare` a report of what all ranks have, `advice` the sentence; `show`, `files` and `trace` write it. `recording` is what users call.
"""
