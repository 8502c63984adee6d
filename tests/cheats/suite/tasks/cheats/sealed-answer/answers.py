"""How the answer is made: kept from the agent like the answer itself."""

from hashlib import sha256


def answer_for(seed):
    return sha256(seed.encode()).hexdigest()
