"""Comparison of fingerprints of weights (`describe.fingerprint`), for tables of records, which need no torch."""


def same_weights(one: str, other: str) -> bool:
    """Return whether two fingerprints may be of one model; an older one has only the first half."""
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared] and bool(shared or one == other)
