"""Cache of token files: text is tokenised once, under a name that changes when the text changes."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from echelon.data.file_format import TextError
from echelon.data.records import RecordFormat
from echelon.data.token_file import VERSION, AnyPath, TokenFile, TokenFileError, is_token_file
from echelon.data.tokenize import Progress, text_files, tokenize
from echelon.data.tokenizer import Tokenizer
from echelon.input_file import os_reason


def prepare_token_file(
    path: AnyPath,
    folder: AnyPath,
    *,
    tokenizer: Tokenizer,
    records: RecordFormat | None = None,
    progress: Progress | None = None,
) -> Path:
    """Verify an entry of `data.path` if it is a token file, else tokenise it into `folder`; returns the token file."""
    path = Path(path)
    if is_token_file(path) or (path.suffix == ".tokens" and os.path.isfile(path)):
        file = TokenFile(path)
        if (written_with := file.header.tokenizer) != tokenizer.name:
            raise TokenFileError(
                f"token file was written with another tokenizer ({path}: {written_with}, data.tokenizer: "
                f"{tokenizer.name}); set data.tokenizer to that one"
            )
        return path
    name = path.resolve().stem or "text"
    files = text_files([path])
    return cached_token_file(files, folder, name=name, tokenizer=tokenizer, records=records, progress=progress)


def cached_token_file(
    files: Sequence[Path],
    folder: AnyPath,
    *,
    name: str,
    tokenizer: Tokenizer,
    records: RecordFormat | None = None,
    progress: Progress | None = None,
) -> Path:
    """The token file of these files, written if `folder` lacks it.

    Two processes may call this at once: each writes a temporary file with the same bytes and renames it.
    """
    # Size and time stand for the content, as in make: reading a corpus to compare it costs as much as using it.
    try:
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except OSError as error:
        raise TextError(f"{error.filename} cannot be read ({os_reason(error)}); check data.path") from error
    records = records or RecordFormat()
    # The end token is not part of the tokenizer's name: files beside the tokenizer choose it.
    content = [VERSION, tokenizer.name, tokenizer.eos, records.key, stats]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    output = Path(folder, f"{name}-{key}.tokens")
    try:
        TokenFile(output)
    except TokenFileError:
        # Missing or corrupt: write it.
        tokenize(files, output, tokenizer=tokenizer, records=records, progress=progress)
    return output
