"""A directory that is put first on Python's path where an interpreter is started as a spare; see `sitecustomize` in it."""
