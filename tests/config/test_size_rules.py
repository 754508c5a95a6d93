"""Sizes that no rank of this machine can hold are refused before anything is allocated."""

from __future__ import annotations

import pytest

from echelon.config import size_rules
from echelon.config.run_config import Config
from echelon.layout import ValidationError

GIB = 1 << 30


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_rules, "machine_memory", lambda: 16 * GIB)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def refused(*settings: str, world: int | None = None) -> dict[str, str]:
    try:
        Config.load(None, ["device=cpu", *settings], world=world, to_train=True)
    except ValidationError as error:
        return {issue.key: str(issue) for issue in error.issues}
    return {}


def test_a_huge_batch_or_sequence_is_refused() -> None:
    assert "requires at least" in refused("batch=1000000000")["batch"]
    assert "requires at least" in refused("seq_len=100000000")["seq_len"]
    assert refused("seq_len=100000000", "batch=1000000000").keys() == {"seq_len", "batch"}, "all at once"
    assert "16.0 in all here" in refused("model=llama-405b", "batch=1")["model"]
    assert "1 to " in refused("steps=9000000000000000000")["steps"]


def test_the_bound_counts_what_a_rank_holds() -> None:
    """llama-tiny: 4 layers of width 64 in float32 and 24 bytes of data, 1,048 bytes a token."""
    fits = int(16 * GIB / 1048 / 128)
    assert refused(f"batch={fits}") == {}
    assert "batch" in refused(f"batch={fits + 1}")
    assert refused(f"batch={4 * fits}", "layout=dp=4", world=4) == {}
    assert refused(f"batch={4 * fits}", "layout=accumulate=4") == {}
    assert "batch" in refused(f"batch={4 * fits + 4}", "layout=dp=4", world=4)
    # A run that recomputes holds one residual stream, and so may one that offloads or compresses.
    for setting in ("layout=recompute=full", "layout=offload=activations", "compress=lossless"):
        assert refused(f"batch={3 * fits}", setting) == {}, setting


@pytest.mark.parametrize("layout", ["cp=2", "tp=2"])
def test_ranks_that_divide_a_sequence_divide_its_activations(layout: str) -> None:
    """Not its data: 24 bytes, and half of 1,024."""
    fits = int(16 * GIB / 536 / 128)
    assert refused(f"batch={fits}", f"layout={layout}", world=2) == {}
    assert "batch" in refused(f"batch={fits + 1}", f"layout={layout}", world=2)


def test_only_training_is_limited_by_this_machine() -> None:
    """`verify` chooses its own batch: a configuration for a cluster is verified on a laptop."""
    assert Config.load(None, ["batch=1000000000"]).batch == 10**9


def test_a_gpu_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_rules, "GPU_DEVICES", ("/dev/null",))
    assert refused("device=auto", "batch=2000000") == {}
    assert "batch" in refused("device=auto", "batch=20000000", "layout=dp=1", world=1), "its data is on the host"


def test_the_memory_of_a_container_counts(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(size_rules, "CGROUP_LIMITS", (tmp_path / "memory.max", tmp_path / "none"))
    total = size_rules.machine_memory()
    (tmp_path / "memory.max").write_text(f"{total // 2}\n")
    assert size_rules.machine_memory() == total // 2
