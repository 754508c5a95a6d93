"""The model that a run has trained, for `echelon export`."""

from __future__ import annotations

from pathlib import Path

from echelon.checkpoint.checkpoint_index import INDEX, CheckpointError
from echelon.checkpoint.full_tensor import tensors_of
from echelon.checkpoint.hf.convert_model import Ours
from echelon.checkpoint.load import find, open_index
from echelon.checkpoint.storage import NAME, storage_of
from echelon.config.run_config import Config
from echelon.models import user_model
from echelon.models.model_dir import Saved, is_saved, read
from echelon.training.resume import FOLDER, where
from echelon.training.run_dir import Run
from echelon.training.task import shape_of


def is_trained(source: str) -> bool:
    """Whether a text is the directory of a run, or of a checkpoint."""
    return (Path(source) / INDEX).is_file() or (where(source)[0] / "config.toml").is_file()


def trained(source: str, *, average: bool = False) -> Ours:
    """From the newest checkpoint of a run, or from the one that is given; its averaged weights, if asked for."""
    path, step = Path(source), None
    if match := NAME.fullmatch(path.name):
        address, step = str(path.parent), int(match[1])
    else:
        address = Run.open(path).config.checkpoint.path or str(path / FOLDER)
    storage = storage_of(address)
    step = find(storage, step)
    index = open_index(storage, step)
    index.check()
    config = Config.from_toml(str(index.facts["config"]))
    if user_model.is_own(config.model):
        raise ValueError(f"a module of your own has no form that Hugging Face knows (model={config.model})")
    weights = "average." if average else "model."
    tensors = tensors_of(storage, step, index, {weights: "", "buffer.": ""})
    if average and not any(name.startswith(weights) for name in index.tensors):
        raise CheckpointError(f"the run keeps no average of its weights ({address}); train with optimizer.ema")
    kind = read(Path(config.model)).model_type if is_saved(config.model) else ""
    return Saved(config=shape_of(config), model_type=kind), tensors
