"""The word by which a launcher tells those who wait at the rendezvous that a rank has ended well, and comes to no meeting any more."""


def ended_key(rank: int) -> str:
    """The key that is set when the process of `rank` has ended with exit code 0."""
    return f"ended/{rank}"
