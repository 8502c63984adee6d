"""Generates a random election: voters, ballots and result."""

import random
from collections import Counter
from dataclasses import dataclass

CANDIDATES = ["Ruiz", "Okonkwo", "Lindgren", "Papadakis", "Tanaka", "Weaver", "Sokolov"]
GIVEN = ["Ana", "Ben", "Cleo", "Dev", "Edith", "Farid", "Gus", "Hana", "Ivo", "Jun"]
FAMILY = ["Adler", "Baptiste", "Chen", "Doyle", "Ekström"]
POINTS = (5, 3, 1)
NOTICE_DAYS = 90


@dataclass(frozen=True)
class Voter:
    """Days are relative to the election: -3 is three days before."""

    id: int
    name: str
    joined: int
    left: int | None

    @property
    def may_vote(self) -> bool:
        return self.joined <= -NOTICE_DAYS and (self.left is None or self.left >= 0)


@dataclass(frozen=True)
class Ballot:
    """`choices` are candidates' ids, first choice first; `minute` is when the ballot was cast."""

    id: int
    voter: int
    minute: int
    spoiled: bool
    choices: tuple[int, ...]

    @property
    def void(self) -> bool:
        return self.spoiled or len(set(self.choices)) < len(self.choices)


@dataclass(frozen=True)
class Election:
    voters: tuple[Voter, ...]
    ballots: tuple[Ballot, ...]
    withdrawn: frozenset[int]

    def tally(self) -> dict[int, int]:
        """Return the points of each candidate who did not withdraw, according to the statutes."""
        last = {ballot.voter: ballot for ballot in sorted(self.ballots, key=lambda ballot: ballot.minute)}
        points = Counter(dict.fromkeys(set(ids()) - self.withdrawn, 0))
        for voter in self.voters:
            ballot = last.get(voter.id)
            if voter.may_vote and ballot is not None and not ballot.void:
                choices = [choice for choice in ballot.choices if choice not in self.withdrawn]
                points.update(dict(zip(choices, POINTS, strict=False)))
        return dict(points)

    def first_count(self) -> dict[int, int]:
        """Return the announced result, which wrongly counts every ballot."""
        points = Counter(dict.fromkeys(ids(), 0))
        for ballot in self.ballots:
            for choice, value in zip(ballot.choices, POINTS, strict=False):
                points[choice] += value
        return dict(points)


def ids() -> range:
    return range(1, len(CANDIDATES) + 1)


def generate(seed: str) -> Election:
    """Return an election whose first count is wrong for every candidate; deterministic for a seed."""
    rng = random.Random(seed)
    while True:
        election = _generate(rng)
        first_count, tally = election.first_count(), election.tally()
        if all(first_count[candidate] != points for candidate, points in tally.items()):
            return election


def _generate(rng: random.Random) -> Election:
    names = rng.sample([f"{family}, {given}" for family in FAMILY for given in GIVEN], 45)
    voters = tuple(_voter(rng, number, name) for number, name in enumerate(names, 1))
    casters = [voter.id for voter in voters if rng.random() < 0.9]
    casters += rng.sample(casters, 12) + rng.sample(casters, 4)
    minutes = rng.sample(range(600), len(casters))
    ballots = tuple(
        Ballot(number, voter, minute, rng.random() < 0.08, _choices(rng))
        for number, (voter, minute) in enumerate(zip(casters, minutes, strict=True), 1)
    )
    return Election(voters, ballots, frozenset(rng.sample(ids(), 2)))


def _voter(rng: random.Random, number: int, name: str) -> Voter:
    joined = rng.choice([-rng.randint(100, 3000), -NOTICE_DAYS, 1 - NOTICE_DAYS, -rng.randint(1, 88)])
    return Voter(number, name, joined, rng.choice([None] * 8 + [-1, 0]))


def _choices(rng: random.Random) -> tuple[int, ...]:
    ranked = rng.sample(ids(), rng.randint(1, 5))
    if rng.random() < 0.06:
        ranked.append(ranked[0])
    return tuple(ranked)
