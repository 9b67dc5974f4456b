"""Agreement by name on what is done next: ranks say what they are ready for, rank 0 decides. Pure: no rank, thread or tensor is needed.

`request` is what a rank is ready for, `message` how it is told, `table` who has said what, `mismatch` whether that fits together, `fusion` what
travels together, `vocabulary` how names that come again are told in one number, and `coordinator` all of it.
"""
