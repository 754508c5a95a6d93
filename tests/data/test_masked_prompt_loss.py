"""Masked prompts train exactly as targets of -100 in a plain loop: the same losses, the same weights."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_engines import engine_of, one_device, tiny, whole

from echelon.config.run_config import Config
from echelon.config.sections import DataConfig, OptimizerConfig
from echelon.training import task

SGD = OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.0)
STEPS, BATCH, SEQ_LEN = 3, 4, 32


def conversations() -> list[dict[str, Any]]:
    """Prompts and answers of all lengths, so that the ranks of a step have different numbers of targets."""
    lines: list[dict[str, Any]] = []
    for number in range(14):
        turns = [("user", "what is " + "one and " * (number % 4)), ("assistant", "x" * (1 + 5 * (number % 3)))]
        messages = [{"role": role, "content": content} for role, content in turns * (1 + number % 2)]
        lines.append({"messages": messages} if number % 5 else {"text": f"text {number}"})
    return lines


def plain_stream() -> tuple[list[int], list[bool]]:
    """Tokens and targets, written down by hand from the definition of ChatML."""
    tokens: list[int] = []
    is_target: list[bool] = []
    for line in conversations():
        if "text" in line:
            parts = [(line["text"], True)]
        else:
            parts = [
                part
                for message in line["messages"]
                for part in (
                    (f"<|im_start|>{message['role']}\n", False),
                    (f"{message['content']}<|im_end|>\n", message["role"] == "assistant"),
                )
            ]
        for text, target in parts:
            tokens += text.encode()
            is_target += [target] * len(text)
        tokens.append(256)
        is_target.append(True)
    return tokens, is_target


def plain_loop(orders: list[list[int]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    tokens, is_target = plain_stream()
    tokens += [256] * SEQ_LEN
    is_target += [False] * (SEQ_LEN + 1)
    model = one_device(tiny())
    losses = []
    for samples in orders:
        rows = torch.tensor([[*range(s * SEQ_LEN, s * SEQ_LEN + SEQ_LEN + 1)] for s in samples])
        window, kept = torch.tensor([*tokens, 256])[rows], torch.tensor(is_target)[rows]
        targets = torch.where(kept[:, 1:], window[:, 1:], -100)
        logits = model.logits(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= SGD.lr * parameter.grad
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained(path: str, cache: Path, layout: str) -> tuple[list[float], dict[str, torch.Tensor], list[list[int]]]:
    config = Config(data=DataConfig(path=(path,)), seq_len=SEQ_LEN, batch=BATCH, layout=layout)
    with patch.object(task, "TOKEN_CACHE_DIR", cache):
        text = task.build_task(config, contextlib.nullcontext())
    engine = engine_of(tiny(), layout, optimizer=SGD)
    losses = [engine.step_microbatches(text.microbatches(engine, step)).loss for step in range(STEPS)]
    indices = [np.arange(step * BATCH, (step + 1) * BATCH) for step in range(STEPS)]
    return losses, whole(engine.parallel, "master"), [text.dataset.locate(each).sample.tolist() for each in indices]


@pytest.mark.parametrize("layout", ["dp=1,microbatch=4", "dp=2,microbatch=1,accumulate=2", "pp=2,accumulate=2"])
def test_masked_prompts_train_as_targets_of_minus_100_in_a_plain_loop(tmp_path: Path, pool: Any, layout: str) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, conversations())))
    world = 1 if layout.startswith("dp=1") else 2
    ranks = pool.run(trained, world, str(path), tmp_path / "cache", layout)
    losses, weights, orders = ranks[0]
    expected, reference = plain_loop(orders)
    assert losses == pytest.approx(expected, rel=1e-10)
    for name, value in reference.items():
        assert (weights[name] - value).abs().max() <= 1e-10 * max(1.0, float(value.abs().max())), name
