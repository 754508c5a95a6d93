"""Token files made once: text is tokenised into a folder, under a name that changes when the text changes."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from echelon.data.token_file import VERSION, TokenFile, TokenFileError, is_token_file
from echelon.data.tokenize import Progress, text_files, tokenize
from echelon.data.tokenizer import Tokenizer


def prepare_token_file(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    progress: Progress | None = None,
) -> Path:
    """One entry of `data.path` as a token file: itself where it is one, else its text tokenised into `folder`.

    A token file is read once as a whole and compared with its checksum.
    """
    path = Path(path)
    if is_token_file(path) or (path.suffix == ".tokens" and path.is_file()):
        file = TokenFile(path)
        made_with = file.header.tokenizer
        if made_with != tokenizer.name:
            raise TokenFileError(
                f"token file was made with another tokenizer ({path}: {made_with}, data.tokenizer: {tokenizer.name}); "
                "set data.tokenizer to the one that made it"
            )
        file.verify()
        return path
    return cached_token_file(
        text_files([path]), folder, name=path.resolve().stem or "text", tokenizer=tokenizer, progress=progress
    )


def cached_token_file(
    files: Sequence[Path],
    folder: str | os.PathLike[str],
    *,
    name: str,
    tokenizer: Tokenizer,
    progress: Progress | None = None,
) -> Path:
    """The token file of these text files, made if `folder` does not have it.

    Two processes may ask at once: both write, each into a temporary file, and the same bytes take the name twice.
    """
    # Size and time stand for the content, as in make: to read a corpus only to compare it costs as much as to use it.
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps([VERSION, tokenizer.name, facts]).encode()).hexdigest()[:16]
    output = Path(folder, f"{name}-{key}.tokens")
    try:
        TokenFile(output)
    except TokenFileError:
        # Not there, or damaged by something other than us: either way it can be made again.
        tokenize(files, output, tokenizer=tokenizer, progress=progress).verify()
    return output
