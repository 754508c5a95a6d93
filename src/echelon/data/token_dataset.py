"""Token files -> batches. The dataset is stateless: a batch is a function of its global sample indices.

    tokens of a file    a a a a|e b b b b b b|e c c c c c c c c|e          documents, each with its end (e)
    samples, T = 5      [0        ][1        ][2        ][3        ][4 - - -]
    sample s            tokens  s*T ... s*T + T - 1,  targets one further

The last sample is padded with `eos` and has no targets there, so in one epoch every token but the first of a file is a
target exactly once. Where a file has a loss mask, a target that the mask leaves out is `NO_TARGET`.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from echelon.data.blended_dataset import SourceBlend
from echelon.data.sample_order import epoch_and_sample, validate_indices
from echelon.data.token_file import AnyIntArray, AnyPath, IntArray, TokenFile, TokenFileError
from echelon.layout.validation_error import ValidationError, ValidationIssue
from echelon.models.model_config import IGNORE_INDEX

NO_TARGET = IGNORE_INDEX
"""The target where there is nothing to predict."""


class SampleLocation(NamedTuple):
    """File, epoch and sample number of each sample of a batch."""

    file: IntArray
    epoch: IntArray
    sample: IntArray


class TokenDataset:
    """Samples of `seq_len` tokens from one or more token files, in an order fixed by the seed.

    With weights, file f provides `weights[f]` of every sum(weights) samples, and each file has its own epochs.
    Without, the files are one long source: an epoch visits each sample of each file once. The last `eval_fraction` of
    each file's samples is held out. With `mask_documents` a batch also contains the document of each token, and no
    target crosses into the next document.
    """

    def __init__(
        self,
        files: Sequence[AnyPath],
        weights: Sequence[float],
        seq_len: int,
        seed: int,
        *,
        mask_documents: bool = False,
        eval_fraction: float = 0.0,
    ) -> None:
        self.files, faults = _open_token_files(files)
        self.seq_len, self.seed, self.mask_documents, self.eval_fraction = seq_len, seed, mask_documents, eval_fraction
        self.blend: SourceBlend | None = None
        if seq_len < 1:
            faults.append(ValidationIssue("seq_len", str(seq_len), "is not a valid length", legal=">= 1"))
        if not 0 <= eval_fraction < 1:
            rule = "is not a valid share of the samples"
            faults.append(ValidationIssue("data.eval_fraction", str(eval_fraction), rule, legal="0 <= x < 1"))
        if len(weights) not in (0, len(files)):
            rule = f"does not have one weight for each of the {len(files)} sources"
            faults.append(ValidationIssue("data.weights", str(list(weights)), rule))
        elif len(weights):
            try:
                self.blend = SourceBlend.from_weights(weights)
            except ValueError as error:
                faults.append(ValidationIssue("data.weights", str(list(weights)), f"cannot be used: {error}"))
        if faults:
            raise ValidationError(faults)
        # A file of n tokens has n - 1 targets. Fewer samples would lose some, more would add a sample without any.
        total = np.array([-(-(file.header.num_tokens - 1) // seq_len) for file in self.files], np.int64)
        wanted = np.maximum(np.rint(total * eval_fraction).astype(np.int64), 1 if eval_fraction else 0)
        self._num_eval: IntArray = np.minimum(wanted, total - 1)
        self._num_train: IntArray = total - self._num_eval
        if eval_fraction and not self.num_eval:
            rule = f"leaves nothing to evaluate on: no file has two samples (seq_len {seq_len})"
            hint = "use 0, or a smaller seq_len"
            raise ValidationError([ValidationIssue("data.eval_fraction", str(eval_fraction), rule, hint=hint)])

    @property
    def num_train(self) -> int:
        """Samples to train on, over all files."""
        return int(self._num_train.sum())

    @property
    def num_eval(self) -> int:
        """Samples held out for evaluation, over all files."""
        return int(self._num_eval.sum())

    @property
    def vocab_size(self) -> int:
        return self.files[0].header.vocab_size

    @property
    def eos(self) -> int:
        return self.files[0].header.eos

    @property
    def fingerprint(self) -> str:
        """A hash of the data and its order: runs with equal fingerprints read the same samples in the same order."""
        hashes, counts = [file.header.sha256 for file in self.files], self.blend.counts if self.blend else ()
        identity = [hashes, counts, self._num_train.tolist(), self.seq_len, self.seed, self.mask_documents]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def locate(self, indices: AnyIntArray) -> SampleLocation:
        """Find the file, epoch and sample of each global index."""
        indices = validate_indices(indices)
        if self.blend is None:
            epoch, sample = epoch_and_sample(indices, num_samples=self.num_train, seed=self.seed)
            ends = np.cumsum(self._num_train)
            file = np.searchsorted(ends, sample, side="right").astype(np.int64)
            return SampleLocation(file, epoch, sample - (ends - self._num_train)[file])
        file, rank = self.blend.source_and_index(indices)
        epoch, sample = np.empty_like(file), np.empty_like(file)
        for source in np.unique(file).tolist():
            rows = file == source
            num_samples = int(self._num_train[source])
            located = epoch_and_sample(rank[rows], num_samples=num_samples, seed=self.seed, stream=source)
            epoch[rows], sample[rows] = located
        return SampleLocation(file, epoch, sample)

    def batch(self, indices: AnyIntArray) -> dict[str, IntArray]:
        """`tokens`, `targets` and, where documents are masked, `documents`, each [B, T], for these global indices."""
        location = self.locate(indices)
        return self._read(location.file, location.sample)

    def eval_batch(self, indices: AnyIntArray) -> dict[str, IntArray]:
        """The same for the held-out samples, in file order. An index past `num_eval` gives a row without targets, so
        that batches of one shape cover the held-out samples exactly."""
        indices = validate_indices(indices)
        ends = np.cumsum(self._num_eval)
        file = np.searchsorted(ends, indices, side="right").astype(np.int64)
        inside = file < len(self.files)
        safe = np.where(inside, file, 0)
        sample = self._num_train[safe] + indices - (ends - self._num_eval)[safe]
        return self._read(np.where(inside, file, -1), sample)

    def describe(self) -> list[tuple[str, str, str]]:
        """The resolved settings as (name, value, reason), for the start of a run."""
        headers = [file.header for file in self.files]
        num_tokens, num_documents = sum(h.num_tokens for h in headers), sum(h.num_documents for h in headers)
        data = f"{num_tokens:,} tokens in {num_documents:,} documents"
        samples = f"{self.num_train:,} to train, {self.num_eval:,} to evaluate"
        rows = [
            ("data", data, f"{len(headers)} token file(s), tokenizer {headers[0].tokenizer}"),
            ("samples", samples, f"seq_len {self.seq_len}, eval_fraction {self.eval_fraction}"),
            ("data fingerprint", self.fingerprint, "the same data in the same order has the same one"),
        ]
        if any(header.num_targets is not None for header in headers):
            targets = sum(h.num_tokens if h.num_targets is None else h.num_targets for h in headers)
            rows.append(("targets", f"{targets:,} of {num_tokens:,} tokens", "the loss mask leaves out the others"))
        if self.blend is not None:
            shares = ", ".join(f"{count}/{self.blend.period}" for count in self.blend.counts)
            rows.insert(2, ("shares", shares, "data.weights as samples of each file in a period"))
        return rows

    def _read(self, files: IntArray, samples: IntArray) -> dict[str, IntArray]:
        length = self.seq_len
        window = np.full((len(files), length + 1), self.eos, np.int64)
        is_target = np.zeros((len(files), length + 1), bool)
        starts = np.zeros((len(files), length + 1), np.int64)
        for row, (number, sample) in enumerate(zip(files.tolist(), samples.tolist(), strict=True)):
            if number < 0:
                continue
            file, begin = self.files[number], sample * length
            piece = file.read(begin, begin + length + 1)
            window[row, : len(piece)] = piece
            is_target[row, : len(piece)] = file.is_target(begin, begin + len(piece))
            if self.mask_documents:
                # int64 on both sides: mixed dtypes would make NumPy copy every offset of the file first.
                first, last = np.searchsorted(file.offsets, np.array([begin, begin + length], np.int64), side="right")
                starts[row, file.offsets[first:last] - begin] = 1
                # The padding after the end of the file is a document of its own, so that no token attends to it.
                starts[row, len(piece) :][:1] = 1
        targets = np.where(is_target[:, 1:], window[:, 1:], NO_TARGET)
        batch = {"tokens": np.ascontiguousarray(window[:, :-1]), "targets": targets}
        if self.mask_documents:
            targets[starts[:, 1:] == 1] = NO_TARGET
            batch["documents"] = np.cumsum(starts[:, :-1], axis=1)
        return batch


def _open_token_files(paths: Sequence[AnyPath]) -> tuple[list[TokenFile], list[ValidationIssue]]:
    """Open the token files; returns them and all issues of files that are unreadable or do not match the others."""
    files: list[TokenFile] = []
    faults: list[ValidationIssue] = []
    if not paths:
        faults.append(ValidationIssue("data.path", "", "is empty"))
    for path in paths:
        try:
            file = TokenFile(path)
        except TokenFileError as error:
            faults.append(ValidationIssue("data.path", os.fspath(path), f"cannot be used: {error}"))
            continue
        ours, theirs = file.header, files[0].header if files else file.header
        if (ours.tokenizer, ours.vocab_size, ours.eos) != (theirs.tokenizer, theirs.vocab_size, theirs.eos):
            rule = f"has another tokenizer than the first token file ({ours.tokenizer}, {theirs.tokenizer})"
            hint = "tokenise all sources with one tokenizer"
            faults.append(ValidationIssue("data.path", os.fspath(path), rule, hint=hint))
        files.append(file)
    return files, faults
