import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    assert capsys.readouterr().out == "18 tokens, 1 document\n"
    # What the comments say.
    assert (names["indices"], names["mine"]) == (range(84, 96), range(88, 92))
    batch = names["batch"]
    assert isinstance(batch, dict)
    assert {key: (value.shape, value.dtype) for key, value in batch.items()} == {
        "tokens": ((4, 128), np.int64),
        "targets": ((4, 128), np.int64),
    }
