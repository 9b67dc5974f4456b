"""`hora chaos`: faults on purpose, and what became of the job. One file for each kind of fault; each run is judged by all oracles."""
