"""`adapter_config.json` of PEFT: what a LoRA adapter in its format says about itself. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.input_file import InputFileError, read_json
from echelon.layout.validation_error import ValidationError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PLAIN_VALUES: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
}
"""values of keys that our adapters can start from; others compute something else"""


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """The scales and ranks of an adapter."""

    rank: int
    alpha: float
    rslora: bool = False
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        """Read a directory; raise ValidationError for what is no LoRA adapter in PEFT's format."""
        try:
            given = read_json(folder / CONFIG_FILE)
        except InputFileError as error:
            raise _refusal(folder, f"has no {CONFIG_FILE} ({error.reason})") from None
        if not (folder / WEIGHTS_FILE).is_file():
            raise _refusal(folder, f"has no {WEIGHTS_FILE}")
        problems = list(_problems(given)) if isinstance(given, dict) else ["it is no table"]
        if problems:
            raise _refusal(folder, f"has an {CONFIG_FILE} that cannot be used ({'; '.join(problems)})")
        patterns = {str(key): float(value) for key, value in (given.get("alpha_pattern") or {}).items()}
        rank, alpha = given["r"], float(given["lora_alpha"])
        return cls(rank=rank, alpha=alpha, rslora=bool(given.get("use_rslora")), alpha_pattern=patterns)

    def alpha_of(self, module: str) -> float:
        """The alpha of a module: of the first pattern that matches the end of its name, as in PEFT."""
        for pattern, alpha in self.alpha_pattern.items():
            if module == pattern or re.match(rf"(.*\.)?({pattern})$", module):
                return alpha
        return self.alpha


def _problems(given: Mapping[str, Any]) -> Iterator[str]:
    for key, legal in PLAIN_VALUES.items():
        if given.get(key, legal[0]) not in legal:
            yield f"{key}={given[key]}, supported: {legal[0]}"
    if type(given.get("r")) is not int or given["r"] < 1:
        yield f"r={given.get('r')} is no rank"
    if not isinstance(given.get("lora_alpha"), int | float):
        yield f"lora_alpha={given.get('lora_alpha')} is no number"
    if not isinstance(given.get("alpha_pattern") or {}, dict):
        yield "alpha_pattern is no table"


def _refusal(folder: Path, message: str) -> ValidationError:
    legal = f"a directory with {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT and `echelon export` write"
    return ValidationError.single("lora.init", str(folder), message, legal=legal)
