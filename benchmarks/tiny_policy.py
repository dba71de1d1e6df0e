"""A language model of 0.1 M parameters and a task that it learns in seconds: reverse five letters.

Rows of one length, so that nothing is padded, in plain PyTorch. `benchmarks/staleness.py` trains it
with the trainer's own losses.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer_service.packed import PackedBatch

LETTERS, WORD = 26, 5
SEPARATOR, END = 26, 27
VOCABULARY = 32
PROMPT, ANSWER = WORD + 1, WORD + 2
HIDDEN, LAYERS, HEADS = 64, 2, 4
SUPERVISED_STEPS, SUPERVISED_ROWS, SUPERVISED_LR = 160, 128, 1e-3


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.before_mlp = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """`x` behind the layer, and its keys and values with those of the tokens `before`."""
        rows, length, _ = x.shape
        qkv = self.qkv(self.before_attention(x)).view(rows, length, 3, HEADS, -1)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        held = qkv[1:] if before is None else torch.cat([before, qkv[1:]], dim=3)
        attended = functional.scaled_dot_product_attention(
            qkv[0], held[0], held[1], is_causal=length > 1
        )
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, HIDDEN))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x)))), held


class Policy(nn.Module):
    """A causal transformer over rows of equal length."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(PROMPT + ANSWER, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        """Logits, float32 [rows, tokens, vocabulary].

        Args:
            ids: int64 [rows, tokens], the next ones behind what the cache has seen.
            cache: Of each layer keys and values; extended in place.
        """
        seen = cache[0].shape[3] if cache else 0
        length = ids.shape[1]
        x = self.tokens(ids) + self.places.weight[seen : seen + length]
        held = []
        for index, layer in enumerate(self.layers):
            x, keys_and_values = layer(x, cache[index] if cache else None)
            held.append(keys_and_values)
        if cache is not None:
            cache[:] = held
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def sample(self, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """int64 and float32 [rows, ANSWER]: answers, and log-probabilities; after END both 0."""
        cache: list[Tensor] = []
        ids, done = prompts, torch.zeros(len(prompts), dtype=torch.bool)
        tokens, logprobs = [], []
        for _ in range(ANSWER):
            scores = self(ids, cache)[:, -1].log_softmax(dim=-1)
            drawn = torch.multinomial(scores.exp(), 1, generator=generator)
            tokens.append(torch.where(done, 0, drawn[:, 0]))
            logprobs.append(torch.where(done, 0.0, scores.gather(1, drawn)[:, 0]))
            done = done | (drawn[:, 0] == END)
            ids = drawn
        return torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1)


def words(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompts, int64 [rows, PROMPT], and right answers with END, int64 [rows, WORD + 1]."""
    letters = torch.randint(LETTERS, (rows, WORD), generator=generator)
    mark, end = torch.full((rows, 1), SEPARATOR), torch.full((rows, 1), END)
    return torch.cat([letters, mark], dim=1), torch.cat([letters.flip(1), end], dim=1)


def lengths_of(answers: Tensor) -> Tensor:
    """int64 [rows]: tokens up to END, that one included."""
    ended = (answers == END).int()
    return torch.where(ended.any(dim=1), ended.argmax(dim=1) + 1, ANSWER)


def right(answers: Tensor, truth: Tensor) -> Tensor:
    """float32 [rows]."""
    return (answers[:, : WORD + 1] == truth).all(dim=1).float()


def taught(seed: int, kept: Path) -> Policy:
    """The policy that reinforcement begins with: half of its lessons had random answers.

    Args:
        kept: Where it is kept, since all runs of a seed begin with it.
    """
    torch.manual_seed(seed)
    if kept.exists():
        policy = Policy()
        policy.load_state_dict(torch.load(kept, weights_only=True))
        return policy
    generator = torch.Generator().manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=SUPERVISED_LR, weight_decay=0.0)
    for _ in range(SUPERVISED_STEPS):
        prompts, truth = words(SUPERVISED_ROWS, generator)
        noise = torch.randint(LETTERS, (SUPERVISED_ROWS // 2, WORD), generator=generator)
        truth[: SUPERVISED_ROWS // 2, :WORD] = noise
        ids = torch.cat([prompts, truth], dim=1)
        logits = policy(ids[:, :-1])[:, PROMPT - 1 :]
        loss = functional.cross_entropy(logits.flatten(0, 1), truth.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.save(policy.state_dict(), kept.with_suffix(".partial"))
    kept.with_suffix(".partial").rename(kept)
    return policy


def scores(policy: Policy, batch: PackedBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, float32 [n], of a micro-batch's trained tokens.

    Every token of an answer is trained, so that a sequence's tokens are its answer's, in order.
    """
    owners = torch.from_numpy(batch.sequences)
    starts = np.flatnonzero(np.diff(batch.sequences, prepend=-1))
    counts = np.diff(np.append(starts, batch.sequences.size))
    places = torch.from_numpy(np.arange(batch.sequences.size) - np.repeat(starts, counts))
    used, own = torch.unique(owners, return_inverse=True)
    logits = policy(rows[used, :-1])[own, PROMPT - 1 + places]
    distributions = logits.log_softmax(dim=-1)
    logprobs = distributions.gather(1, torch.from_numpy(batch.targets)[:, None])[:, 0]
    return logprobs, -(distributions.exp() * distributions).sum(dim=1)
