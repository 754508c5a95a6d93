"""`hf:DIR`: a directory from Hugging Face with a `config.json`, and weights if there are any. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.input_file import InputFileError, read_json
from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean

HF_PREFIX = "hf:"
CONFIG_FILE = "config.json"
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
MAX_SIZE = 2**31
"""of a vocabulary, a width or a length"""


def is_hf_model(model: str) -> bool:
    """Whether a model is given as `hf:DIR`."""
    return model.startswith(HF_PREFIX)


@dataclass(frozen=True)
class HFSource:
    """What is read of a directory before transformers is imported."""

    folder: Path
    config: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def name(self) -> str:
        return f"{self.folder.resolve().name} ({self.model_type})"

    @property
    def has_weights(self) -> bool:
        return any((self.folder / name).is_file() for name in WEIGHT_FILES)

    @property
    def vocab(self) -> int:
        return self._size("vocab_size")

    @property
    def max_seq_len(self) -> int:
        """The longest sequence that the config states; 0 where it states none."""
        return self._size("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")

    def _size(self, *keys: str) -> int:
        text = self.config.get("text_config")
        for config in (self.config, text if isinstance(text, Mapping) else {}):
            for key in keys:
                if isinstance(config.get(key), int):
                    return int(config[key])
        return 0


def read_hf_source(model: str) -> HFSource:
    """Read the directory of `hf:DIR`. Raises ValidationError if it cannot be a model of transformers."""
    folder = Path(model.removeprefix(HF_PREFIX))
    issues: list[ValidationIssue] = []

    def add_issue(message: str, *, legal: str = "", hint: str = "") -> None:
        issues.append(ValidationIssue(key="model", value=model, message=message, legal=legal, hint=hint))

    if importlib.util.find_spec("transformers") is None:
        add_issue("requires transformers, which is not installed", hint="pip install echelon[transformers]")
    try:
        config = read_json(folder / CONFIG_FILE)
    except InputFileError as error:
        add_issue(f"{CONFIG_FILE} {error.reason}", legal="hf:DIR, a local directory with a config.json")
        raise ValidationError(issues) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        add_issue(f"{CONFIG_FILE} names no model_type", legal="the config.json of a causal language model")
    elif "auto_map" in config and not _is_known(config["model_type"]):
        add_issue("needs Python code from its directory, which is never run", legal="a class that transformers has")
    else:
        source = HFSource(folder, config)
        for key, size in (("vocab_size", source.vocab), ("max_position_embeddings", source.max_seq_len)):
            if not 0 <= size < MAX_SIZE or (key == "vocab_size" and not size):
                add_issue(f"{CONFIG_FILE} has an impossible {key} ({size})", legal=f"1 to {MAX_SIZE - 1}")
        if not issues:
            return source
    raise ValidationError(issues)


def check_model_type(source: HFSource) -> None:
    """Raise ValidationError if transformers, which this imports, has no causal language model of this type."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    given, known = source.model_type, list(CONFIG_MAPPING)
    if given in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    rule = "which is not a causal language model" if given in known else "which transformers does not have"
    hint = "" if given in known else did_you_mean(given, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    model, message = f"{HF_PREFIX}{source.folder}", f"{CONFIG_FILE} has model_type {given!r}, {rule}"
    raise ValidationError.single("model", model, message, hint=hint)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide the progress bars and notices of transformers: a run prints its own."""
    from transformers.utils import logging

    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()


def _is_known(model_type: str) -> bool:
    if importlib.util.find_spec("transformers") is None:
        return True
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING
