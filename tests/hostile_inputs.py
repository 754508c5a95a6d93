"""Hostile input, by seed: files that a stranger or a broken disk may give, each with the command that reads it.

`hostile_case(seed, folder, samples)` writes the input below `folder/in` and returns the arguments of `echelon`. The
checksums are right, so that what is behind them is reached.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

DEEP, LONG = "@@deep@@", "@@long@@"
"""stand for brackets 100,000 deep and an integer of 10,000 digits, which json.dumps does not write"""
VALUES = (
    *(None, True, False, 0, -1, 1, 2, 7, 1.5, -0.0, 1e300, 1e-300, float("nan"), float("inf"), float("-inf")),
    *(2**31, 2**53, 2**63, -(2**63) - 1, 2**64, 10**30, 10**99, 10**120),
    *(
        "",
        "x",
        "nan",
        "1",
        "0x10",
        "\0",
        "\ud800",
        "x" * 300,
        "é\n\x1b[31m",
        "../../etc/passwd",
        "/",
        "/dev/zero",
        "{}",
    ),
    *([], {}, [[]], {"": None}, [1, 2], ["a", None], [[[[1]]]], {"a": {"b": {"c": []}}}, list(range(2000))),
    *(DEEP, LONG),
)
TEXTS = (
    *("", " ", "null", "[]", "{}", '"text"', "1", "[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 5000),
    *("1" * 10_000, "\0", "\ufeff{}", "x = [", "[a", "a.b.c", "a" + ".a" * 20_000 + " = 1", "a = " + "[" * 50_000),
    *("a = 1\na = 2", "a = 1979-05-27", "x" * 100_000, "NaN", "Infinity", "\r\n" * 1000, "x = " + "9" * 6000),
)
BYTES = (b"", b"\xff\xfe\x00", b"\x80" * 100, bytes(range(256)), b"\x00" * 5000, b"PK\x03\x04", b"\x93NUMPY")

Arguments = list[str]


class Samples:
    """Valid files, made once, that the cases change."""

    def __init__(self, folder: Path, run: Path, hf: Path, native: Path, tokens: Path, text: Path):
        self.folder, self.run, self.hf, self.native, self.tokens, self.text = folder, run, hf, native, tokens, text


def hostile_case(seed: int, folder: Path, samples: Samples) -> Arguments:
    rng = random.Random(seed)
    (folder / "in").mkdir(parents=True)
    make = MAKERS[seed % len(MAKERS)]
    return [*map(str, make(rng, folder / "in", samples)), *(["--json"] if rng.random() < 0.5 else [])]


# -- changes of files -------------------------------------------------------------------------------------------------


def dumps(tree: Any) -> str:
    text = json.dumps(tree)
    return text.replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000).replace(f'"{LONG}"', "9" * 10_000)


def changed_tree(rng: random.Random, tree: Any) -> Any:
    """One node of a JSON value is replaced, removed, doubled or renamed."""
    tree = json.loads(json.dumps(tree))
    if rng.random() < 0.03:
        return rng.choice(VALUES)
    nodes = list(_nodes(tree))
    # Nodes near the root are few, and each of them matters as much as one of thousands of leaves.
    depth = rng.choice(sorted({depth for _, _, depth in nodes}))
    parent, key, _ = rng.choice([node for node in nodes if node[2] == depth])
    action = rng.choice(("replace", "replace", "replace", "remove", "rename", "nudge"))
    if action == "remove":
        del parent[key]
    elif action == "rename" and isinstance(parent, dict):
        parent[rng.choice(("", "x", "../x", key + "x"))] = parent.pop(key)
    elif action == "nudge" and isinstance(parent[key], int | float):
        parent[key] = parent[key] + rng.choice((1, -1, 0.5, 10**6))
    else:
        parent[key] = rng.choice(VALUES)
    return tree


def _nodes(tree: Any, depth: int = 0):
    for key in range(len(tree)) if isinstance(tree, list) else list(tree) if isinstance(tree, dict) else ():
        yield tree, key, depth
        yield from _nodes(tree[key], depth + 1)


def changed_text(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return rng.choice((text[:at], text[:at] + rng.choice(TEXTS) + text[at:], text[at:], rng.choice(TEXTS)))


def strange_file(rng: random.Random, path: Path) -> None:
    """Put something else in the place of a file."""
    path.unlink(missing_ok=True)
    kind = rng.choice(("fifo", "directory", "device", "loop", "bytes", "text", "nothing", "dangling", "sparse"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/full")))
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "dangling":
        path.symlink_to(path.with_name("nowhere"))
    elif kind == "bytes":
        path.write_bytes(rng.choice(BYTES))
    elif kind == "text":
        path.write_text(rng.choice(TEXTS), encoding="utf-8")
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 42)


# -- configurations and layouts ---------------------------------------------------------------------------------------

NUMBERS = (
    "0",
    "-1",
    "1e300",
    "1e-300",
    "nan",
    "inf",
    "99999999999999999999",
    "9" * 5000,
    "1000000000",
    "9007199254740993",
)
CONFIG_TEXT = 'model = "llama-tiny"\nseq_len = 64\nbatch = 8\nsteps = 2\ndevice = "cpu"\n[optimizer]\nlr = 0.001\n'


def configuration(rng: random.Random, folder: Path, samples: Samples) -> list[Any]:
    from echelon.config.run_config import Config

    path, kind = folder / "config.toml", rng.choice(("key", "key", "key", "set", "text", "file", "unknown"))
    key = rng.choice(list(Config.keys())).name
    value = rng.choice((*NUMBERS, *NUMBERS, *map(_toml, VALUES[:-1])))
    path.write_text(CONFIG_TEXT)
    if kind == "key":
        head = "\n".join(line for line in CONFIG_TEXT.splitlines()[:5] if not line.startswith(f"{key} "))
        path.write_text(f"{head}\n{key} = {value}\n", encoding="utf-8", errors="replace")
    elif kind == "set":
        return ["train", path, "--set", f"{key}={value}".replace("\0", "").encode(errors="replace").decode()]
    elif kind == "text":
        path.write_text(changed_text(rng, CONFIG_TEXT), encoding="utf-8")
    elif kind == "file":
        strange_file(rng, path)
    else:
        path.write_text(f'{CONFIG_TEXT}\n["{"k" * rng.choice((1, 300, 5000))}"]\nx = {value}\n', errors="replace")
    return [rng.choice(("train", "train", "verify")), path]


def _toml(value: Any) -> str:
    text = json.dumps(value).replace(f'"{DEEP}"', "[" * 5000).replace("NaN", "nan").replace("Infinity", "inf")
    return text.replace(": ", " = ") if isinstance(value, dict) else text


def layout(rng: random.Random, folder: Path, samples: Samples) -> list[Any]:
    from echelon.layout import grammar

    values = (
        "0",
        "-1",
        "1",
        "2",
        "3",
        "4",
        "8",
        "1e9",
        "99999999999999999999",
        "9" * 5000,
        "",
        "x",
        "2.5d",
        "file:/dev/zero",
    )
    words = ("none", "full", "sqrt", "every:0", "every:999999999999", "budget:nanGiB", "budget:1e400GiB", "budget:0GiB")
    pairs = [
        f"{rng.choice(grammar.KEYS).name}={rng.choice((*values, *values, *words, 'interleaved', 'zb-v', 'disk+disk'))}"
        for _ in range(rng.randint(1, 5))
    ]
    text = rng.choice((",", ",", ",,", ";")).join(pairs)
    text = rng.choice((text, text, text, text + "=" * 1000, "dp=" * 500, "\u202e" + text, text.upper(), "=" + text))
    command = rng.choice(("train", "plan", "verify"))
    if command == "train":
        return ["train", "--set", "device=cpu", "--set", f"layout={text}"]
    if command == "verify":
        return ["verify", "--layouts", text]
    return ["plan", "llama-tiny", "--cluster", rng.choice(("1xh100", "8xh100")), "--layout", text]


# -- runs and checkpoints ---------------------------------------------------------------------------------------------


def checkpoint(rng: random.Random, folder: Path, samples: Samples) -> list[Any]:
    run = folder.parent / "out" / "run"
    shutil.copytree(samples.run, run)
    place = sorted((run / "checkpoints").iterdir())[-1]
    kind = rng.choice(("index",) * 8 + ("index text", "digest", "part", "file", "step"))
    index = json.loads((place / "index.json").read_text())
    if kind == "index":
        write_index(place, dumps(changed_tree(rng, index)))
    elif kind == "index text":
        write_index(place, changed_text(rng, json.dumps(index)))
    elif kind == "digest":
        strange_file(rng, place / "index.sha256")
    elif kind == "part":
        part = next(place.glob("part-*"))
        data = bytearray(part.read_bytes())
        data[rng.randrange(len(data))] ^= 255
        part.write_bytes(data[: rng.choice((len(data), len(data), 100, 0))])
    elif kind == "file":
        strange_file(rng, next(place.glob("part-*")))
    else:
        write_index(place, dumps({**index, "step": rng.choice((float("nan"), -1, 10**18, 1.0, "2", None, True))}))
    if rng.random() < 0.3:
        return ["export", run, folder.parent / "out" / "exported"]
    return ["train", "--resume", run, "--set", "steps=3"]


def write_index(place: Path, text: str) -> None:
    """With the right digest."""
    data = text.encode(errors="replace")
    (place / "index.json").write_bytes(data)
    (place / "index.sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  index.json\n")


def run_file(rng: random.Random, folder: Path, samples: Samples) -> list[Any]:
    """The log, plan, configuration, timeline or measurement of a run."""
    run = folder.parent / "out" / "run"
    shutil.copytree(samples.run, run)
    name = rng.choice(("log.jsonl",) * 3 + ("plan.json", "config.toml", "timeline.json", "measured.json"))
    path = run / name
    if rng.random() < 0.2:
        strange_file(rng, path)
    elif name == "log.jsonl":
        lines = path.read_text().splitlines()
        at = rng.randrange(len(lines))
        lines[at] = rng.choice((changed_text(rng, lines[at]), *(dumps(changed_tree(rng, json.loads(lines[at]))),) * 3))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="replace")
    elif name == "config.toml":
        path.write_text(changed_text(rng, path.read_text()), encoding="utf-8")
    elif name == "timeline.json":
        times = [[["0F0", 0.0, 1.0], ["0B0", 1.0, 3.0]]]
        tree = {"planned": {"name": "1f1b", "homes": [0], "measured": False, "note": "", "ranks": times}}
        path.write_text(dumps(changed_tree(rng, tree)))
    elif path.exists():
        path.write_text(dumps(changed_tree(rng, json.loads(path.read_text()))))
    if name == "timeline.json" or rng.random() < 0.2:
        return ["draw", run]
    if name == "measured.json":
        return ["plan", "llama-tiny", "--cluster", "1xh100", "--correct", run]
    return ["train", "--resume", run, "--set", "steps=3"]


# -- data -------------------------------------------------------------------------------------------------------------


def token_file(rng: random.Random, folder: Path, samples: Samples) -> list[Any]:
    path = folder / "data.tokens"
    shutil.copy(samples.tokens, path)
    kind = rng.choice(("header", "header", "tokens", "offsets", "zeros", "bytes", "file", "text"))
    if kind in ("header", "tokens", "offsets"):
        change_token_file(path, kind, rng)
    elif kind == "zeros":
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    elif kind == "bytes":
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif kind == "file":
        strange_file(rng, path)
    else:
        path = folder / "data.txt"
        path.write_bytes(rng.choice((*BYTES, b"\xff" * 100, b"a", b"\n" * 10)))
    extra = ["--set", "data.mask_documents=true"] if rng.random() < 0.5 else []
    return [*_train_on(samples), "--set", f"data.path={path}", *extra]


def _train_on(samples: Samples) -> list[Any]:
    settings = (f"model={samples.native}", "batch=2", "seq_len=16", "steps=1", "device=cpu")
    return ["train", *(word for setting in settings for word in ("--set", setting))]


def change_token_file(path: Path, part: str, rng: random.Random) -> None:
    """Change the header, the tokens or the offsets, with the right checksums."""
    from echelon.data.token_file import BLOCK_BYTES, HEADER_BYTES, MAGIC, VERSION, TokenFile

    file = TokenFile(path)
    header, tokens, offsets = file.header, np.array(file.tokens), np.array(file.offsets)
    if part == "tokens":
        tokens[rng.randrange(len(tokens))] = rng.choice((header.vocab_size, 2**16 - 1))
    elif part == "offsets":
        offsets[rng.randrange(len(offsets))] = rng.choice((-1, -(2**63), 2**63 - 1, 0, len(tokens), 1))
    padding = bytes(header.offsets_start - HEADER_BYTES - tokens.nbytes)
    payload = tokens.tobytes() + padding + offsets.tobytes()
    blocks = [zlib.crc32(payload[at : at + BLOCK_BYTES]) for at in range(0, len(payload), BLOCK_BYTES)]
    table = np.array(blocks, "<u4").tobytes()
    header = replace(header, sha256=hashlib.sha256(payload).hexdigest(), blocks_crc32=zlib.crc32(table))
    fields: Any = {"magic": MAGIC, "version": VERSION, **asdict(header)}
    if part == "header":
        changed = changed_tree(rng, {key: value for key, value in fields.items() if key != "magic"})
        fields = {"magic": MAGIC, **(changed if isinstance(changed, dict) else {"version": changed})}
    text = json.dumps({**fields, "crc32": zlib.crc32(json.dumps(fields).encode())}).encode()
    path.write_bytes(text[: HEADER_BYTES - 1].ljust(HEADER_BYTES - 1) + b"\n" + payload + table)


CHAT = [
    {"text": "a text of one record"},
    {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5", "name": None}]},
]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos }}\n{% endfor %}"


def records(rng: random.Random, folder: Path, samples: Samples) -> list[Any]:
    """JSONL and Parquet, compressed or not, with changed records, bytes and chat templates."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    name = rng.choice(("x.jsonl", "x.jsonl", "x.jsonl.gz", "x.jsonl.xz", "x.jsonl.zst", "x.txt.bz2", "x.parquet"))
    path, kind = folder / name, rng.choice(("record", "record", "line", "bytes", "cut", "file", "template", "template"))
    changed = [changed_tree(rng, record) if kind == "record" else record for record in CHAT]
    text = "\n".join(
        changed_text(rng, dumps(r)) if kind == "line" and rng.random() < 0.5 else dumps(r) for r in changed
    )
    if name == "x.parquet":
        try:
            pq.write_table(
                pa.Table.from_pylist([r if isinstance(r, dict) else {"text": repr(r)} for r in changed]), path
            )
        except (pa.ArrowException, OverflowError, TypeError, UnicodeError, ValueError):
            path.write_bytes(b"PAR1" * 100)
    else:
        path.write_bytes(_compressed(name, (text * rng.choice((1, 50))).encode(errors="replace")))
    data = bytearray(path.read_bytes())
    if kind == "bytes":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif kind == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "file":
        strange_file(rng, path)
    extra = []
    if kind == "template":
        (folder / "chat.jinja").write_text(changed_text(rng, TEMPLATE), encoding="utf-8")
        extra = ["--set", f"data.chat_template={folder / 'chat.jinja'}"]
    return [*_train_on(samples), "--set", f"data.path={path}", *extra]


def _compressed(name: str, data: bytes) -> bytes:
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    if name.endswith(".zst") and find_spec("zstandard"):  # without the package the name alone is refused
        import zstandard

        compress[".zst"] = zstandard.ZstdCompressor().compress
    return compress.get(Path(name).suffix, bytes)(data)


def tokenizer(rng: random.Random, folder: Path, samples: Samples) -> list[Any]:
    path = folder / "tokenizer.json"
    vocabulary = {"<|endoftext|>": 0, **{chr(97 + i): i + 1 for i in range(26)}}
    tree = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    path.write_text(dumps(changed_tree(rng, tree)))
    if rng.random() < 0.3:
        strange_file(rng, path)
    return [*_train_on(samples), "--set", f"data.path={samples.text}", "--set", f"data.tokenizer={path}"]


# -- Hugging Face and native models -----------------------------------------------------------------------------------


def hugging_face(rng: random.Random, folder: Path, samples: Samples) -> list[Any]:
    source, target = folder / "hf", folder.parent / "out" / "native"
    shutil.copytree(samples.hf, source)
    kind = rng.choice(
        ("config",) * 5 + ("header",) * 3 + ("index",) * 2 + ("length", "weights", "link", "file", "target")
    )
    weights = source / "model.safetensors"
    config = json.loads((source / "config.json").read_text())
    if kind == "config":
        (source / "config.json").write_text(dumps(changed_tree(rng, config)))
    elif kind == "header":
        header, data = read_safetensors(weights)
        write_safetensors(weights, dumps(changed_tree(rng, header)).encode(), data)
    elif kind == "length":
        data = weights.read_bytes()
        weights.write_bytes(struct.pack("<Q", rng.choice((0, 1, 2**40, 2**63, 2**64 - 1, 99_999_999))) + data[8:])
    elif kind == "weights":
        header, data = read_safetensors(weights)
        array = np.frombuffer(bytearray(data), np.float32).copy()
        array[rng.randrange(len(array))] = rng.choice((np.nan, np.inf, -np.inf))
        write_safetensors(weights, json.dumps(header).encode(), array.tobytes())
    elif kind == "link":
        name = rng.choice(("model.safetensors", "config.json"))
        outside = folder / "elsewhere" / name
        outside.parent.mkdir()
        (source / name).rename(outside)
        (source / name).symlink_to(outside)
    elif kind == "index":
        shard = rng.choice(("model-00001-of-00001.safetensors", "../hf/model.safetensors", "/etc/passwd", "x.bin", ""))
        header, _ = read_safetensors(weights)
        if shard.startswith("model-"):
            weights.rename(source / shard)
        else:
            weights.rename(source / "y.safetensors")
        tree = {"metadata": {}, "weight_map": {name: shard for name in header if name != "__metadata__"}}
        text = dumps(changed_tree(rng, tree) if rng.random() < 0.7 else tree)
        (source / "model.safetensors.index.json").write_text(text)
    elif kind == "file":
        strange_file(rng, source / rng.choice(("model.safetensors", "config.json")))
    else:
        target.mkdir(parents=True)
        (target / "precious.txt").write_text("mine")
    if kind == "config" and rng.random() < 0.4:
        return ["plan", source, "--cluster", "1xh100", "--layout", "dp=1", "--batch", "4", "--seq-len", "16"]
    return ["import", source, target, *(["--dtype", rng.choice(("float16", "int3"))] if rng.random() < 0.2 else [])]


def read_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_safetensors(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def native_model(rng: random.Random, folder: Path, samples: Samples) -> list[Any]:
    model = folder / "native"
    shutil.copytree(samples.native, model)
    path = model / "model.json"
    path.write_text(dumps(changed_tree(rng, json.loads(path.read_text()))))
    if rng.random() < 0.15:
        strange_file(rng, model / rng.choice(("model.json", "model.safetensors")))
    if rng.random() < 0.4:
        return ["plan", model, "--cluster", "1xh100", "--layout", "dp=1", "--batch", "4", "--seq-len", "16"]
    return [*_train_on(replace_native(samples, model)), "--set", f"data.path={samples.tokens}"]


def replace_native(samples: Samples, model: Path) -> Samples:
    return Samples(samples.folder, samples.run, samples.hf, model, samples.tokens, samples.text)


# -- schedules, clusters, plans, tables -------------------------------------------------------------------------------

SCHEDULE = "# 1F1B\nrank 0, stages 0: 0F0 0F1 0B0 0B1 0U1\nrank 1, stages 1: 1F0 1B0 1F1 1B1 1U1\n"
ACTIONS = (
    "0F0",
    "9F9",
    "0F999999999999999999999",
    "0F" + "9" * 5000,
    "0U1",
    "0K0",
    "0D5",
    "1I0",
    "1W0",
    "0F0.1",
    "0F0@3",
)


def schedule_file(rng: random.Random, folder: Path, samples: Samples) -> list[Any]:
    path, kind = folder / "schedule.txt", rng.choice(("text", "words", "words", "words", "file"))
    path.write_text(changed_text(rng, SCHEDULE), encoding="utf-8")
    if kind == "words":
        words = SCHEDULE.split(" ")
        for _ in range(rng.randint(1, 3)):
            words[rng.randrange(5, len(words))] = rng.choice((*ACTIONS, "rank", "stages", "999999999:", "0,1:", "\n"))
        path.write_text(" ".join(words))
    elif kind == "file":
        strange_file(rng, path)
    if rng.random() < 0.6:
        return ["draw", f"file:{path}"]
    return ["train", "--set", "device=cpu", "--set", f"layout=pp=2,accumulate=2,schedule=file:{path}"]


CLUSTER = {
    "name": "basement",
    "part": [{"kind": "h100", "nodes": 1, "per_node": 2}],
    "inside": {"bandwidth_gbps": 450, "latency_us": 3},
    "host": {"memory_gib": 1024, "disk_gbps": 8},
    "curves": {"matmul": [[4096, 4096, 4096, 650.0]], "memory_tbps": 2.9, "all_reduce": [[1048576, 4.1e-5]]},
}


def cluster_file(rng: random.Random, folder: Path, samples: Samples) -> list[Any]:
    path = folder / "cluster.toml"
    tree = changed_tree(rng, CLUSTER)
    tables = tree.items() if isinstance(tree, dict) else [("part", tree)]
    text = "\n".join(f"{json.dumps(key)} = {_toml_tree(value)}" for key, value in tables)
    path.write_text(text.replace(f'"{LONG}"', "9" * 10_000), encoding="utf-8", errors="replace")
    if rng.random() < 0.25:
        strange_file(rng, path)
    layout = ["--layout", "dp=2"] if rng.random() < 0.7 else []
    return ["plan", "llama-tiny", "--cluster", path, "--batch", "8", "--seq-len", "64", *layout]


def _toml_tree(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_tree(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_tree, value)) + "]"
    return _toml(value)


def plan_file(rng: random.Random, folder: Path, samples: Samples) -> list[Any]:
    path = folder / "plan.json"
    tree = {"plans": [{"layout": "dp=1", "precision": "bf16", "step_s": 0.1}], "reasons": []}
    path.write_text(dumps(changed_tree(rng, tree)))
    if rng.random() < 0.25:
        strange_file(rng, path)
    return ["train", "--plan", path, "--set", "device=cpu"]


ROW = {
    "source_id": "a",
    "model_name": "m",
    "hidden": "1024",
    "layers": "8",
    "seq_len": "1024",
    "gpu": "A100-80GB",
    "gpus": "8",
    "tp": "1",
    "pp": "1",
    "global_batch": "64",
    "step_time_s": "1.0",
    "note": "",
    "heads": "8",
}


def table(rng: random.Random, folder: Path, samples: Samples) -> list[Any]:
    path, row = folder / "table.csv", dict(ROW)
    numbers = ("0", "-1", "nan", "inf", "1e300", "1e-300", "9" * 400, "1.5", "", "x", "1e9", '"\n"')
    for _ in range(rng.randint(1, 3)):
        row[rng.choice(list(row))] = rng.choice(numbers)
    text = ",".join(row) + "\n" + ",".join(ROW.values()) + "\n" + ",".join(row.values()) + "\n"
    path.write_text(text if rng.random() < 0.7 else changed_text(rng, text), encoding="utf-8")
    if rng.random() < 0.2:
        strange_file(rng, path)
    return ["score", path]


def profile(rng: random.Random, folder: Path, samples: Samples) -> list[Any]:
    path = folder / "profile.json"
    link = {"forward_s": 0.1, "input_s": 0.1, "weight_s": 0.1, "activation_bytes": 100, "parameter_bytes": 100}
    tree = {"links": [{"name": name, **link} for name in ("embed", "blocks.0", "head")], "source": "measured"}
    path.write_text(dumps(changed_tree(rng, tree)))
    if rng.random() < 0.2:
        strange_file(rng, path)
    return ["train", "--set", "device=cpu", "--set", "layout=pp=2,accumulate=2", "--set", f"pipeline.profile={path}"]


MAKERS: tuple[Callable[[random.Random, Path, Samples], list[Any]], ...] = (
    *(configuration, checkpoint, token_file, hugging_face, run_file, layout, cluster_file, schedule_file),
    *(configuration, checkpoint, native_model, hugging_face, checkpoint, plan_file, table, profile, tokenizer, records),
)
