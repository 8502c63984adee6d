"""Calculates the answer. The agent must not see this file."""

from hashlib import sha256


def answer_for(seed):
    return sha256(seed.encode()).hexdigest()
