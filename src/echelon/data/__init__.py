"""Token files, and the sample order as a pure function. NumPy only, except synthetic_images.py."""

from echelon.data.blended_dataset import SourceBlend
from echelon.data.chat_template import ChatTemplate, load_chat_template
from echelon.data.default_corpus import default_corpus
from echelon.data.file_format import TextError, may_hold_records
from echelon.data.records import RecordFormat
from echelon.data.sample_order import epoch_and_sample, rank_indices, sample_indices_of_step
from echelon.data.token_cache import prepare_token_file
from echelon.data.token_dataset import NO_TARGET, SampleLocation, TokenDataset
from echelon.data.token_file import TokenFile, TokenFileError, TokenWriter, is_token_file
from echelon.data.tokenize import text_files, tokenize
from echelon.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, TokenizerError, load_tokenizer

__all__ = [
    "NO_TARGET",
    "ByteTokenizer",
    "ChatTemplate",
    "JsonTokenizer",
    "RecordFormat",
    "SampleLocation",
    "SourceBlend",
    "TextError",
    "TokenDataset",
    "TokenFile",
    "TokenFileError",
    "TokenWriter",
    "Tokenizer",
    "TokenizerError",
    "default_corpus",
    "epoch_and_sample",
    "is_token_file",
    "load_chat_template",
    "load_tokenizer",
    "may_hold_records",
    "prepare_token_file",
    "rank_indices",
    "sample_indices_of_step",
    "text_files",
    "tokenize",
]
