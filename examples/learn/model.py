"""A small transformer, and sampling from it with a cache of keys and values."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.learn.text import END

CONTEXT = 1024
"""Most tokens of a conversation."""


Read = tuple[Tensor, Tensor, Tensor]
"""What a block keeps of tokens that it has read: keys, values, and the last few of its inputs."""
Past = list[Read]
REACH = 4
"""Tokens that a block sees without attention: the newest and those just before it."""


class Block(nn.Module):
    """A convolution over the last tokens, attention, and two matrices; each is added to the stream.

    The convolution ("Canon layers", Allen-Zhu 2025) and the values' start as what the output undoes make a
    model of this size learn to copy in a hundred steps instead of thousands.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.near = nn.Conv1d(width, width, REACH, groups=width, bias=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        with torch.no_grad():
            nn.init.orthogonal_(self.out.weight)
            self.qkv.weight[2 * width :] = self.out.weight.T

    def forward(self, x: Tensor, turns: Tensor, past: Read | None) -> tuple[Tensor, Read]:
        batch, length, width = x.shape
        if past is None:
            inputs = functional.pad(x, (0, 0, REACH - 1, 0))
        else:
            inputs = torch.cat([past[2].expand(batch, -1, -1), x], dim=1)
        x = x + self.near(inputs.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, turns), rotate(k, turns)
        before = 0
        if past is not None:
            # The past of one prompt may be that of a whole batch.
            before = past[0].shape[2]
            k = torch.cat([past[0].expand(batch, -1, -1, -1), k], dim=2)
            v = torch.cat([past[1].expand(batch, -1, -1, -1), v], dim=2)
        mask = None
        if before and length > 1:
            mask = torch.ones(length, before + length, dtype=torch.bool).tril(before)
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not before)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)))), (k, v, inputs[:, 1 - REACH :])


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: pairs of numbers as complex numbers, turned."""
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns).flatten(-2)


class Model(nn.Module):
    """A causal transformer. The scores of the next token after each one."""

    def __init__(self, tokens: int, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.embedding = nn.Embedding(tokens, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        half = width // heads // 2
        angles = torch.outer(torch.arange(CONTEXT), 1000.0 ** (-torch.arange(half) / half))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, ids: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
        """The scores of the token after each one, and the keys and values of all until now."""
        start = 0 if past is None else past[0][0].shape[2]
        x, turns = self.embedding(ids), self.turns[start : start + ids.shape[1]]
        kept: Past = []
        for number, block in enumerate(self.blocks):
            x, read = block(x, turns, None if past is None else past[number])
            kept.append(read)
        return self.norm(x) @ self.embedding.weight.T, kept

    def log_probabilities(self, prompt: list[int], rows: Tensor) -> Tensor:
        """Of each token of each row but its first, given the prompt, which is read once for all of them."""
        _, past = self(torch.tensor([prompt]))
        scores, _ = self(rows[:, :-1], past)
        return scores.log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]


class Conversation:
    """The tokens of one conversation after its prompt; which were sampled, and their log-probabilities.

    Sampled tokens are kept as they were sampled: their text is never encoded again. `past` is that of the
    prompt.
    """

    def __init__(self, model: Model, past: Past, generator: torch.Generator) -> None:
        self.ids: list[int] = []
        self.sampled: list[bool] = []
        self.log_probabilities: list[float] = []
        self._model, self._past, self._generator = model, past, generator
        self._read = 0
        self.seconds = 0.0
        """How long it took, with its calls."""

    def add(self, ids: list[int]) -> None:
        """Add tokens of the environment."""
        self.ids += ids
        self.sampled += [False] * len(ids)
        self.log_probabilities += [0.0] * len(ids)

    @torch.no_grad()
    def sample(self, most: int) -> list[int]:
        """Sample tokens until END, or until there are `most`; returns them without END."""
        written: list[int] = []
        while len(written) < most:
            scores, self._past = self._model(torch.tensor([self.ids[self._read :]]), self._past)
            self._read = len(self.ids)
            logs = scores[0, -1].log_softmax(-1)
            token = int(torch.multinomial(logs.exp(), 1, generator=self._generator))
            self.ids.append(token)
            self.sampled.append(True)
            self.log_probabilities.append(float(logs[token]))
            if token == END:
                break
            written.append(token)
        return written


def read_weights(model: Model, file: str) -> bool:
    """Read the weights that were written there; whether there are any."""
    if not Path(file).exists():
        return False
    model.load_state_dict(torch.load(file))
    return True


def write_weights(model: Model, file: str) -> None:
    """Write the weights, unless no file is named."""
    if file:
        torch.save(model.state_dict(), file)
