from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from echelon.data import TokenFile, TokenWriter

Write = Callable[..., TokenFile]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a token file. A number stands for a document of that length, of counting tokens."""

    def write(
        documents: Sequence[int | Sequence[int]],
        *,
        name: str = "data.tokens",
        vocab_size: int = 257,
        tokenizer: str = "bytes",
    ) -> TokenFile:
        path = tmp_path / name
        position = 0
        with TokenWriter(path, vocab_size=vocab_size, eos=vocab_size - 1, tokenizer=tokenizer) as writer:
            for document in documents:
                if isinstance(document, int):
                    document = [(position + i) % (vocab_size - 1) for i in range(document)]
                position += len(document)
                writer.write_document([np.array(document, np.int64)])
        return TokenFile(path)

    return write
