"""A run of the demo's model on its text, in a process of its own: for benches that compare the losses runs end at."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from echelon.training.run.run_dir import Run


def trained(settings: Mapping[str, Any], *, steps: int, seed: int) -> tuple[float, list[dict[str, Any]]]:
    """(the evaluation loss at its end, the log's steps)."""
    with tempfile.TemporaryDirectory() as folder:
        usual = {"eval.every": steps, "eval.batches": 16, "sample.tokens": 0, "run": f"{folder}/run"}
        command = [sys.executable, "-m", "echelon", "train", "--json"]
        for key, value in {"steps": steps, "seed": seed, **usual, **settings}.items():
            command += ["--set", f"{key}={value}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"a run failed (seed={seed}, {dict(settings)}):\n{done.stderr}")
        return float(json.loads(done.stdout)["eval_loss"]), list(Run.open(f"{folder}/run").records("step"))
