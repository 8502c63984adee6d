"""A random election: ballots and result."""

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
        """Return the points of each standing candidate according to the statutes."""
        last = {ballot.voter: ballot for ballot in sorted(self.ballots, key=lambda ballot: ballot.minute)}
        points = Counter(dict.fromkeys(set(ids()) - self.withdrawn, 0))
        for voter in self.voters:
            ballot = last.get(voter.id)
            if voter.may_vote and ballot is not None and not ballot.void:
                choices = [choice for choice in ballot.choices if choice not in self.withdrawn]
                points.update(dict(zip(choices, POINTS, strict=False)))
        return dict(points)

    def first_count(self) -> dict[int, int]:
        """Return the announced result, which counts every ballot as it is."""
        points = Counter(dict.fromkeys(ids(), 0))
        for ballot in self.ballots:
            for choice, worth in zip(ballot.choices, POINTS, strict=False):
                points[choice] += worth
        return dict(points)


def ids() -> range:
    return range(1, len(CANDIDATES) + 1)


def draw(seed: str) -> Election:
    """Return an election whose first count is wrong for every candidate; deterministic for a seed."""
    lot = random.Random(seed)
    while True:
        election = _draw(lot)
        first, right = election.first_count(), election.tally()
        if all(first[candidate] != points for candidate, points in right.items()):
            return election


def _draw(lot: random.Random) -> Election:
    names = lot.sample([f"{family}, {given}" for family in FAMILY for given in GIVEN], 45)
    voters = tuple(_voter(lot, number, name) for number, name in enumerate(names, 1))
    casting = [voter.id for voter in voters if lot.random() < 0.9]
    casting += lot.sample(casting, 12) + lot.sample(casting, 4)
    minutes = lot.sample(range(600), len(casting))
    ballots = tuple(
        Ballot(number, voter, minute, lot.random() < 0.08, _choices(lot))
        for number, (voter, minute) in enumerate(zip(casting, minutes, strict=True), 1)
    )
    return Election(voters, ballots, frozenset(lot.sample(ids(), 2)))


def _voter(lot: random.Random, number: int, name: str) -> Voter:
    joined = lot.choice([-lot.randint(100, 3000), -NOTICE_DAYS, 1 - NOTICE_DAYS, -lot.randint(1, 88)])
    return Voter(number, name, joined, lot.choice([None] * 8 + [-1, 0]))


def _choices(lot: random.Random) -> tuple[int, ...]:
    ranked = lot.sample(ids(), lot.randint(1, 5))
    if lot.random() < 0.06:
        ranked.append(ranked[0])
    return tuple(ranked)
