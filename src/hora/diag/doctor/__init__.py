"""`hora doctor`: is there something in this machine's way, and what is to be done about it. One file for each part of a machine."""
