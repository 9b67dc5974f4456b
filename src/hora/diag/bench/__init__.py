"""Benches: tables beside the peers, measured in the same run. `registry` says how one is added, `rows` what is written."""
