"""The trained model of a run or checkpoint, for `echelon export`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echelon.checkpoint.checkpoint_index import INDEX_FILE, CheckpointError
from echelon.checkpoint.frozen_weights import FACT
from echelon.checkpoint.full_tensor import FullTensor, full_tensors
from echelon.checkpoint.hf.convert_model import NativeModel
from echelon.checkpoint.load import find_step, open_index
from echelon.checkpoint.storage import STEP_DIR_PATTERN, open_storage
from echelon.config.run_config import Config
from echelon.models import user_model
from echelon.models.model_dir import SavedModel, is_model_dir, read_model_dir
from echelon.training.run.resume import CHECKPOINTS_DIR, parse_resume_path
from echelon.training.run.run_dir import Run
from echelon.training.task import configured_model


def is_run_or_checkpoint(source: str) -> bool:
    return (Path(source) / INDEX_FILE).is_file() or (parse_resume_path(source)[0] / "config.toml").is_file()


@dataclass(frozen=True)
class TrainedModel:
    """The configuration of a run, and the tensors of one of its checkpoints."""

    config: Config
    tensors: Mapping[str, FullTensor]
    """parameters and buffers; of a run with adapters, the trained parameters alone"""
    frozen: object = None
    """hash and dtype of the frozen weights of such a run"""

    @property
    def native(self) -> NativeModel:
        config = self.config
        if user_model.is_user_model(config.model):
            raise ValueError(f"Hugging Face has no architecture for a custom model (model={config.model})")
        model_type = read_model_dir(Path(config.model)).model_type if is_model_dir(config.model) else ""
        return SavedModel(config=configured_model(config), model_type=model_type), self.tensors


def load_trained_model(source: str, *, ema: bool = False) -> TrainedModel:
    """Load the model from a run's newest checkpoint, or from a given checkpoint; with `ema` its averaged weights."""
    path, step = Path(source), None
    if match := STEP_DIR_PATTERN.fullmatch(path.name):
        address, step = str(path.parent), int(match[1])
    else:
        address = Run.open(path).config.checkpoint.path or str(path / CHECKPOINTS_DIR)
    storage = open_storage(address)
    step = find_step(storage, step)
    index = open_index(storage, step)
    config = Config.from_toml(index.fact("config", str, ""))
    weights = "average." if ema else "model."
    tensors = full_tensors(storage, step, index, {weights: "", "buffer.": ""})
    if ema and not any(name.startswith(weights) for name in index.tensors):
        raise CheckpointError(f"the run has no averaged weights ({address}); train with optimizer.ema")
    return TrainedModel(config, tensors, index.metadata.get(FACT))
