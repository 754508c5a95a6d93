"""The training task: a built-in language model on text, or a user's model on batches from its file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from echelon import data, models
from echelon.config.run_config import Config
from echelon.layout import ValidationError, ValidationIssue
from echelon.models import user_model
from echelon.models.foreign.hf_source import is_hf_model, read_hf_source
from echelon.models.language_model import LanguageModel
from echelon.models.model_config import ModelConfig
from echelon.models.model_dir import is_model_dir
from echelon.training import generate
from echelon.training.batch_sharding import Microbatch
from echelon.training.engine import Engine
from echelon.training.logging.display import ResolvedSetting
from echelon.training.logging.rank_stats import COLLECT_EVERY
from echelon.training.run.run_fingerprint import RunFingerprint, batch_fingerprint, file_hash, model_fields


def _cache_dir() -> Path:
    try:
        return Path.home() / ".cache" / "echelon"
    except RuntimeError:  # neither HOME nor an entry in the user database
        return Path(tempfile.gettempdir()) / f"echelon-cache-{os.getuid()}"


TOKEN_CACHE_DIR = _cache_dir() / "tokens"
"""cache of tokenized text"""


def build_task(config: Config, first_rank_first: AbstractContextManager[None]) -> TrainingTask:
    if user_model.is_user_model(config.model):
        return UserModelTask(config)
    with first_rank_first:  # rank 0 of each machine tokenizes, the others read its cache
        return ForeignModelTask(config) if is_hf_model(config.model) else LanguageModelTask(config)


class TextTask:
    """A model on tokens, in an order that is a function of the seed."""

    batch_fingerprint = 0.0
    """each rank reads its own rows"""

    def __init__(self, config: Config, *, name: str, vocab: int):
        self.config = config
        self.tokenizer = data.load_tokenizer(config.data.tokenizer)
        source = config.data
        self.records = _record_format(config) if any(map(data.may_hold_records, map(Path, source.path))) else None
        files = [
            data.prepare_token_file(path, TOKEN_CACHE_DIR, tokenizer=self.tokenizer, records=self.records)
            for path in source.path
        ]
        self.dataset = data.TokenDataset(
            files or [data.default_corpus(TOKEN_CACHE_DIR, tokenizer=self.tokenizer)],
            source.weights,
            config.seq_len,
            config.seed,
            mask_documents=source.mask_documents,
            eval_fraction=source.eval_fraction,
        )
        if self.dataset.vocab_size > vocab:
            message = f"has fewer tokens than the data ({vocab} and {self.dataset.vocab_size})"
            legal = "a model with a larger vocabulary, or another data.tokenizer"
            raise ValidationError([ValidationIssue(key="model", value=name, message=message, legal=legal)])

    def describe_data(self) -> list[ResolvedSetting]:
        settings = self.dataset.describe()
        if self.records is not None and self.records.chat_field:
            template, targets = self.records.chat_template, self.records.train_on
            settings.append(("chat template", template.origin, f"of conversations; data.train_on={targets}"))
        return settings

    def example_inputs(self, rows: int) -> dict[str, Tensor]:
        """Return inputs of the model with this many rows."""
        return _tensors(self.dataset.batch(np.arange(rows)))

    def microbatches(self, engine: Engine, step: int, batch: int | None = None) -> Iterator[Microbatch]:
        """Yield this rank's microbatches of a step, from the batch with that number (the step's by default).

        Both count from 0. Sample indices, and so dropout, are those of the step.
        """
        first = (step if batch is None else batch) * self.config.batch
        for rows in engine.row_ranges(self.config.batch):
            indices = np.arange(first + rows.start, first + rows.stop)
            samples = torch.from_numpy(indices + step * self.config.batch - first)
            yield Microbatch(_tensors(self.dataset.batch(indices)), samples)

    def eval_microbatches(self, engine: Engine) -> Iterator[Microbatch]:
        """Yield this rank's microbatches of the held-out data."""
        for number in range(self.config.eval.batches):
            first = number * self.config.batch
            if first >= self.dataset.num_eval:
                return
            for rows in engine.row_ranges(self.config.batch):
                indices = np.arange(first + rows.start, first + rows.stop)
                yield Microbatch(_tensors(self.dataset.eval_batch(indices)), torch.from_numpy(indices))

    def sample_text(self, engine: Engine) -> str:
        sample = self.config.sample
        return generate.generate_text(engine, self.tokenizer, sample.prompt, sample.tokens) if sample.tokens else ""


class LanguageModelTask(TextTask):
    """A built-in model on text."""

    def __init__(self, config: Config):
        self.model_config = configured_model(config)
        self.name = f"{self.model_config.name}: {self.model_config.parameters:,} parameters"
        super().__init__(config, name=self.model_config.name, vocab=self.model_config.vocab)

    @property
    def fingerprint(self) -> RunFingerprint:
        # Without overrides, which are keys of the configuration.
        return RunFingerprint(data=self.dataset.fingerprint, model=model_fields(models.find_model(self.config.model)))

    def build(self) -> nn.Module:
        model = models.build(self.model_config, "meta")
        if is_model_dir(self.config.model):
            from echelon.checkpoint.hf.native_format import init_from_dir

            assert isinstance(model, LanguageModel)
            init_from_dir(model, Path(self.config.model))
        return with_adapters(model, self.config)

    def describe(self) -> list[ResolvedSetting]:
        settings = self.describe_data()
        if is_model_dir(self.config.model):
            reason = "from a model directory; each rank reads its slices"
            settings.append(("initial weights", self.config.model, reason))
        return settings


class ForeignModelTask(TextTask):
    """A causal language model of transformers on text."""

    model_config = None

    def __init__(self, config: Config):
        self.source = read_hf_source(config.model)
        self.name = self.source.name
        super().__init__(config, name=self.name, vocab=self.source.vocab)
        self._weights_read = "drawn by the seed: the directory has no weights"

    @property
    def fingerprint(self) -> RunFingerprint:
        return RunFingerprint(data=self.dataset.fingerprint, model=dict(self.source.config))

    def build(self) -> nn.Module:
        from echelon.models.foreign.causal_lm import ForeignCausalLM, build_causal_lm

        dtype = torch.float64 if self.config.dtype == "float64" else torch.float32
        model: nn.Module = build_causal_lm(self.source, dtype=dtype)
        if self.source.has_weights:
            from echelon.checkpoint.hf.foreign_weights import init_from_hf_dir

            assert isinstance(model, ForeignCausalLM)
            self._weights_read = init_from_hf_dir(model, self.source)
        return with_adapters(model, self.config)

    def describe(self) -> list[ResolvedSetting]:
        return [*self.describe_data(), ("initial weights", str(self.source.folder), self._weights_read)]


class UserModelTask:
    """A user's model `file.py:factory`, with `batch(rows, step)` in the same file for the global batch of a step."""

    model_config = None

    def __init__(self, config: Config):
        self.config, self.name = config, config.model
        self.fingerprint = RunFingerprint(model={}, source=file_hash(Path(config.model.rpartition(":")[0])))
        self.batch_fingerprint = 0.0
        """of all batches so far"""
        self._last_step = -1
        """of the last batch whose fingerprint the ranks compare; batches must be the same on every rank"""
        self._factory = user_model.load_factory(config.model)
        self._batch = user_model.load_factory(config.model.rpartition(":")[0] + ":batch")

    def build(self) -> nn.Module:
        # A factory that uses torch's generator builds the same weights on every rank.
        torch.manual_seed(self.config.seed)
        model: nn.Module = self._factory()
        return with_adapters(model, self.config)

    def describe(self) -> list[ResolvedSetting]:
        return [("data", f"{self._batch.__name__}(rows, step)", "from the file of the model, the same on every rank")]

    def example_inputs(self, rows: int) -> dict[str, Tensor]:
        return {key: value[:rows] for key, value in self._batch(self.config.batch, 0).items()}

    def microbatches(self, engine: Engine, step: int, batch: int | None = None) -> Iterator[Microbatch]:
        global_batch = self._batch(self.config.batch, step if batch is None else batch)
        if step != self._last_step:  # not loaded once more, to look for a fault
            self._last_step, sampled = step, step % COLLECT_EVERY != 0
            self.batch_fingerprint = batch_fingerprint(global_batch, self.batch_fingerprint, sampled=sampled)
        return engine.microbatches(global_batch, step)

    def eval_microbatches(self, engine: Engine) -> Iterator[Microbatch]:
        return iter(())

    def sample_text(self, engine: Engine) -> str:
        return ""


TrainingTask = LanguageModelTask | ForeignModelTask | UserModelTask


def with_adapters(model: nn.Module, config: Config) -> nn.Module:
    """Return the model with the LoRA adapters of the configuration, if it asks for any."""
    if not config.lora.rank:
        return model
    from echelon.models.lora.add_lora import add_adapters

    adapted: nn.Module = add_adapters(model, config.lora, seed=config.seed)
    if config.lora.init:
        from echelon.checkpoint.hf.peft_adapter import load_peft_adapter

        load_peft_adapter(adapted, Path(config.lora.init), config.lora)
    return adapted


def configured_model(config: Config) -> ModelConfig:
    """Return the named model with the overrides of the configuration."""
    return config.override_model(models.find_model(config.model), seq_len=config.seq_len)


def _record_format(config: Config) -> data.RecordFormat:
    source = config.data
    return data.RecordFormat(
        text_field=source.text_field,
        chat_field=source.chat_field,
        chat_template=data.load_chat_template(source.chat_template, source.tokenizer),
        train_on=source.train_on,
    )


def _tensors(batch: dict[str, data.token_file.IntArray]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value) for key, value in batch.items()}
