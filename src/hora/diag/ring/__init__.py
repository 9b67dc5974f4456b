"""`hora ring`: the ring all-reduce step by step, in words and as a picture, from the schedule that the algorithm itself carries out."""
