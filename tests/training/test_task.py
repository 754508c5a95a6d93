from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import torch
from tiny_engines import engine_of, tiny

from echelon import data
from echelon.config.run_config import Config
from echelon.config.sections import DataConfig, EvalConfig
from echelon.layout import Layout, ValidationError
from echelon.training import task

TEXT = "".join(f"line {number} of a text that is long enough\n" for number in range(90))


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(task, "TOKEN_CACHE_DIR", tmp_path / "cache")
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def made(config):
    return task.build_task(config, contextlib.nullcontext())


def indices(engine, batches):
    return [int(sample) for batch in batches for sample in batch.samples]


def on_a_rank(path, layout, step):
    shown = made(Config(data=DataConfig(path=(path,)), seq_len=16, batch=12, layout=layout))
    engine = engine_of(tiny(), layout)
    batches = list(shown.microbatches(engine, step))
    return indices(engine, batches), [batch.inputs["tokens"] for batch in batches]


def test_ranks_shard_the_samples_of_a_step(tokens, pool):
    path = str(data.prepare_token_file(tokens, task.TOKEN_CACHE_DIR, tokenizer=data.load_tokenizer("bytes")))
    ((one, _),) = pool.run(on_a_rank, 1, path, "dp=1,microbatch=12", 3)
    assert one == list(range(36, 48)), "samples are numbered over the whole run"
    for layout in ("dp=2,microbatch=3,accumulate=2", "dp=3,microbatch=4", "tp=2,microbatch=12"):
        ranks = pool.run(on_a_rank, Layout.parse(layout).world, path, layout, 3)
        found = {sample for samples, _ in ranks for sample in samples}
        assert sorted(found) == one, layout
    # The same sample has the same tokens wherever it is read.
    dataset = data.TokenDataset([path], (), 16, 0, eval_fraction=0.02)
    for samples, inputs in ranks:
        assert np.array_equal(dataset.batch(np.array(samples))["tokens"], torch.cat(inputs).numpy())


def test_evaluation_covers_the_held_out_data_only(tokens):
    config = Config(
        data=DataConfig(path=(tokens,), eval_fraction=0.1), seq_len=16, batch=4, eval=EvalConfig(every=1, batches=50)
    )
    shown, engine = made(config), engine_of(tiny(), "dp=1,microbatch=4")
    seen = list(shown.eval_microbatches(engine))
    rows = sum(len(batch.samples) for batch in seen)
    assert shown.dataset.num_eval <= rows < shown.dataset.num_eval + 4
    assert len(list(made(Config(data=config.data, seq_len=16, batch=4)).eval_microbatches(engine))) == 4


def test_document_masks_are_part_of_the_batch(tokens):
    config = Config(data=DataConfig(path=(tokens,), mask_documents=True), seq_len=16, batch=2)
    (batch,) = made(config).microbatches(engine_of(tiny(), "dp=1,microbatch=2"), 0)
    assert batch.inputs.keys() == {"tokens", "targets", "documents"}


def test_conversations_follow_the_configuration(tokens, tmp_path):
    """The template of the tokenizer's directory, targets by data.train_on, both printed when a run starts."""
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"talk": talk}) + "\n") * 9)
    (tmp_path / "short.jinja").write_text("{% for m in messages %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}")
    source = {"path": (str(tmp_path / "chat.jsonl"),), "chat_field": "talk"}
    shown = made(Config(data=DataConfig(**source), seq_len=16))
    assert ("chat template", "built-in ChatML", "of conversations; data.train_on=assistant") in shown.describe()
    assert shown.dataset.files[0].header.num_targets == 9 * len("Hi<|im_end|>\nE")
    short = {**source, "chat_template": str(tmp_path / "short.jinja")}
    masked, every = (made(Config(data=DataConfig(**short, train_on=on), seq_len=16)) for on in ("assistant", "all"))
    assert bytes(masked.dataset.files[0].tokens[:12].tolist()) == b"u:Hello;a:Hi"
    assert masked.dataset.files[0].header.num_targets == 9 * len("a:Hi;E"), "no prompt is generated before a turn"
    assert every.dataset.files[0].header.num_targets is None
    assert "targets" not in [name for name, _, _ in every.describe()]
    assert not [row for row in made(Config(data=DataConfig(path=(tokens,)), seq_len=16)).describe() if "chat" in row[0]]


def test_a_model_with_too_small_a_vocabulary_is_refused(tokens, monkeypatch):
    from echelon.models import model_config

    monkeypatch.setattr(model_config, "SIZES", {"small": tiny(vocab=99)})
    monkeypatch.setattr("echelon.models.find_model", lambda _: tiny(vocab=99))
    with pytest.raises(ValidationError, match=r"fewer tokens than the data \(99 and 257\)"):
        made(Config(data=DataConfig(path=(tokens,)), seq_len=16))


def test_the_configuration_overrides_the_model():
    shape = task.configured_model(Config(model="gpt-tiny", dropout=0.25, tied=False))
    assert (shape.dropout, shape.tied) == (0.25, False)
    assert task.configured_model(Config(model="gpt-tiny")).tied


OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)
    def forward(self, x):
        return self.net(x).sum(), torch.tensor(len(x))

def build():
    return Model()

def batch(rows, step):
    return {"x": torch.full((rows, 2), float(step))}
"""


def test_a_custom_model(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    shown = made(Config(model=f"{tmp_path / 'own.py'}:build", seed=3, batch=4))
    first, second = shown.build(), shown.build()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert shown.model_config is None
    assert (shown.sample_text(None), list(shown.eval_microbatches(None))) == ("", [])
    from echelon.training.engine import Engine

    batches = list(shown.microbatches(Engine(first, "dp=1,accumulate=2"), 5))
    assert [batch.inputs["x"].tolist() for batch in batches] == [[[5.0, 5.0]] * 2] * 2


def test_a_failed_import_of_a_custom_model_is_retried(tmp_path):
    from echelon.models.user_model import load_factory

    path = tmp_path / "broken.py"
    path.write_text("import not_a_module_of_anybody\ndef build(): return 1\n")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            load_factory(f"{path}:build")
    path.write_text("def build(): return 2\n")
    assert load_factory(f"{path}:build")() == 2
