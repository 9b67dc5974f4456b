"""`hora compare`: a recipe's model on a recipe's data, trained for the same number of steps in one process and in each way of using several.

`request` says what is compared, `kinds` what each recipe is before torch is loaded and `subjects` after, `plain` and `ways` how steps are made; the
ranks run `__main__`. `course` starts them in turns, `result` draws the conclusions, and `show` prints and draws them. Timing in turns, rows of
files, starting of ranks, and where a step's time goes are those of the benches and of `hora.report`.
"""
