"""The thread that carries out what the ranks agree on: `links` are its messages, `entry` what it is given, `execute` what it does with tensors."""
