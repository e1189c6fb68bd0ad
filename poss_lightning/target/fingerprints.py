"""Fingerprints of weights (see `describe.fingerprint`), compared: tables of records need no torch for it."""


def same_weights(one: str, other: str) -> bool:
    """Whether two fingerprints may be of one model; one of before they had two halves has the first alone."""
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared] and bool(shared or one == other)
