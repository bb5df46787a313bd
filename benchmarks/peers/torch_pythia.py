"""Pythia in PyTorch as a good engineer would write it: sdpa, fused AdamW, no logits copy, float32.

The training step that needle's worker does, but for the gradients' norm, which is not clipped: forward, mean cross-entropy,
backward, AdamW.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Parallel residual: x + attention(norm1(x)) + mlp(norm2(x))."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int):
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.dense = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: tuple | None = None) -> torch.Tensor:
        """cache: (keys, values, how many there are), which the new ones join; the prompt comes first, then single tokens."""
        B, T, C = x.shape
        packed = self.qkv(self.norm1(x)).view(B, T, self.n_heads, 3, C // self.n_heads)
        q, k, v = packed.permute(3, 0, 2, 1, 4)  # each (B, H, T, D)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            keys, values, used = cache
            keys[:, :, used : used + T], values[:, :, used : used + T] = k, v
            k, v = keys[:, :, : used + T], values[:, :, : used + T]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1 or cache is None)
        attended = self.dense(attended.transpose(1, 2).reshape(B, T, C))
        return x + attended + self.down(F.gelu(self.up(self.norm2(x))))


class Pythia(nn.Module):
    """GPT-NeoX as in Pythia-70M: rotary on a quarter of each head, untied embeddings, eps 1e-5."""

    def __init__(self, vocab_size: int, seq_len: int, d_model=512, n_heads=8, d_ff=2048, n_layers=6):
        super().__init__()
        self.embed_in = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(Block(d_model, n_heads, d_ff) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)
        self.embed_out = nn.Linear(d_model, vocab_size, bias=False)
        rotary = d_model // n_heads // 4
        angles = torch.arange(seq_len)[:, None] * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)  # (T, rotary)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("dense.weight", "down.weight"))
                std = 2 / (n_layers * math.sqrt(d_model)) if residual else math.sqrt(2 / (5 * d_model))
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_in(ids)  # (B, T, C)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.embed_out(self.norm(x))  # (B, T, V)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the first ``cos.shape[-1]`` dimensions of x (B, H, T, D)."""
    rotary = cos.shape[-1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    a, b = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-b, a), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1)


@torch.no_grad()
def generate(model: Pythia, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """(B, T + new_tokens): the prompt and the likeliest tokens after it, with keys and values cached."""
    B, T = ids.shape
    heads, width = model.blocks[0].n_heads, model.norm.normalized_shape[0]
    shape = (B, heads, T + new_tokens, width // heads)
    dtype = model.norm.weight.dtype
    caches = [(ids.new_empty(shape, dtype=dtype), ids.new_empty(shape, dtype=dtype)) for _ in model.blocks]
    fresh, used = ids, 0
    for _ in range(new_tokens):
        n = fresh.shape[1]
        x = model.embed_in(fresh)
        for block, (keys, values) in zip(model.blocks, caches):
            x = block(x, model.cos[used : used + n], model.sin[used : used + n], (keys, values, used))
        used += n
        fresh = model.embed_out(model.norm(x[:, -1:])).argmax(-1)
        ids = torch.cat((ids, fresh), dim=1)
    return ids


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Pythia's AdamW: weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    targets: torch.Tensor,
    region: contextlib.AbstractContextManager,
) -> torch.Tensor:
    """One step on ids and targets, each (B, T), forward within ``region`` (autocast); the loss is returned on the device."""
    optimizer.zero_grad(set_to_none=True)
    with region:
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()
