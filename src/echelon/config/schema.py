"""Schema of the configuration: frozen dataclasses as a table of dotted keys, to parse, validate and write.

The dataclasses are the only description. Annotations define legal values, the text under a field its meaning:

    lr: Annotated[float, Range(low=0, low_open=True)] = 3e-3
    \"\"\"Peak learning rate.\"\"\"

becomes the key ``optimizer.lr``, its type check, its range check and its line in the documentation.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import math
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar

from echelon.input_file import parse_toml
from echelon.layout.validation_error import ValidationIssue, did_you_mean

Tree = TypeVar("Tree")
MAX_INT64 = 2**63 - 1
"""bound of every integer: steps and samples are counted in int64"""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Bounds of a number, or of every number in a list."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def __str__(self) -> str:
        low = f"{'>' if self.low_open else '>='} {self.low}" if self.low > -math.inf else ""
        high = f"{'<' if self.high_open else '<='} {self.high}" if self.high < math.inf else ""
        return " and ".join(part for part in (low, high) if part)


@dataclass(frozen=True)
class OnlyWith:
    """The field has an effect only where a sibling field has one of these values."""

    field: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ConfigKey:
    """One key of the configuration."""

    name: str
    """Dotted name."""
    hint: Any
    """Type annotation, without `Annotated` and without `None`."""
    default: Any
    """Default value."""
    range: Range | None = None
    """Legal numbers."""
    only_with: OnlyWith | None = None
    """Condition under which it has an effect; None: always."""
    meaning: str = ""
    """The text under the field."""

    @property
    def type(self) -> str:
        """Description of the legal types."""
        return _describe_type(self.hint)

    @property
    def legal(self) -> str:
        """The type with its bounds."""
        return f"{self.type}, {self.range}" if self.range and str(self.range) else self.type

    @property
    def condition_key(self) -> str:
        """Dotted name of the key that this one depends on."""
        assert self.only_with is not None
        return ".".join((*self.name.split(".")[:-1], self.only_with.field))


@dataclass(frozen=True)
class SettingText:
    """A value from the command line; its meaning depends on the type of its key."""

    text: str

    @property
    def value(self) -> Any:
        try:
            table = parse_toml(f"value = {self.text}")
        except ValueError:
            return self.text
        # A line break in the text may start a second key: then it is plain text.
        return table["value"] if table.keys() == {"value"} else self.text

    def parse(self, *, expect_text: bool) -> Any:
        """Return the TOML value, or the raw text where a text is expected: `run=7` is a folder, `steps=7` a number."""
        return self.text if expect_text and not isinstance(self.value, str | list) else self.value


class TypeMismatchError(Exception):
    """A value does not match its annotation."""

    def __init__(self, rule: str, remedy: str = "") -> None:
        super().__init__(rule)
        self.rule, self.remedy = rule, remedy


def key_table(cls: type, *, with_meanings: bool = False, prefix: str = "") -> dict[str, ConfigKey]:
    """Return every key of the dataclass `cls`, in source order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    explained = _field_docs(cls) if with_meanings else {}
    table: dict[str, ConfigKey] = {}
    for field in fields(cls):
        name, hint = prefix + field.name, hints[field.name]
        marks: list[Any] = []
        if is_dataclass(hint):
            table |= key_table(typing.cast(type, hint), with_meanings=with_meanings, prefix=name + ".")
            continue
        if typing.get_origin(hint) is Annotated:
            hint, *marks = typing.get_args(hint)
        if _is_union(hint) and types.NoneType in typing.get_args(hint):
            (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        table[name] = ConfigKey(
            name=name,
            hint=hint,
            default=field.default if field.default is not MISSING else None,
            range=next((mark for mark in marks if isinstance(mark, Range)), None),
            only_with=next((mark for mark in marks if isinstance(mark, OnlyWith)), None),
            meaning=explained.get(field.name, ""),
        )
    return table


def parse_values(cls: type, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[ValidationIssue]]:
    """Convert the values in `given` (dotted names) to their types; return them and an issue for each invalid one."""
    table = key_table(cls)
    values: dict[str, Any] = {}
    issues: list[ValidationIssue] = []
    for name, value in given.items():
        if name not in table:
            issues.append(_unknown_key_issue(name, value, table))
            continue
        key = table[name]
        try:
            converted = convert(key.hint, value)
        except TypeMismatchError as mismatch:
            text, remedy = format_given(value), mismatch.remedy
            issues.append(ValidationIssue(name, text, mismatch.rule, legal=key.legal, hint=remedy))
            continue
        numbers = converted if isinstance(converted, tuple) else (converted,)
        if key.range and not all(number in key.range for number in numbers if not isinstance(number, str)):
            issues.append(ValidationIssue(name, format_given(value), "is out of range", legal=key.legal))
            continue
        values[name] = converted
    chosen = {name: key.default for name, key in table.items()} | values
    for name, value in values.items():
        key = table[name]
        if key.only_with and not _has_effect(key, chosen):
            message = f"has no effect with {key.condition_key}={chosen[key.condition_key]}"
            hint = f"leave it out, or set {key.condition_key} to {' or '.join(key.only_with.values)}"
            issues.append(ValidationIssue(name, format_given(value), message, hint=hint))
    return values, issues


def flatten(cls: type, tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested TOML tables into dotted names. Unknown tables stay nested, for `parse_values` to refuse."""
    hints = typing.get_type_hints(cls)
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        if is_dataclass(hints.get(name)) and isinstance(value, Mapping):
            flat |= flatten(hints[name], value, prefix + name + ".")
        else:
            flat[prefix + name] = value
    return flat


def build(cls: type[Tree], values: Mapping[str, Any], prefix: str = "") -> Tree:
    """Build the dataclass from dotted values and defaults."""
    arguments: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if is_dataclass(hint):
            arguments[name] = build(typing.cast(type, hint), values, prefix + name + ".")
        elif prefix + name in values:
            arguments[name] = values[prefix + name]
    return cls(**arguments)


def effective_values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the dotted values that are set and have an effect."""
    flat: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            flat |= effective_values(value, prefix + field.name + ".")
        elif value is not None:
            flat[prefix + field.name] = value
    if prefix:
        return flat
    table = key_table(type(config))
    return {name: value for name, value in flat.items() if _has_effect(table[name], flat)}


def to_toml(values: Mapping[str, Any]) -> str:
    """Format dotted values as TOML, tables after plain keys."""
    plain = [f"{name} = {format_toml(value)}" for name, value in values.items() if "." not in name]
    tables: dict[str, list[str]] = {}
    for name, value in values.items():
        table, _, leaf = name.rpartition(".")
        if table:
            tables.setdefault(table, []).append(f"{leaf} = {format_toml(value)}")
    blocks = ["\n".join(plain), *(f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items())]
    return "\n\n".join(block for block in blocks if block) + "\n"


def format_given(value: Any) -> str:
    """Format a value for an issue: texts without quotes."""
    return value.text if isinstance(value, SettingText) else value if isinstance(value, str) else format_toml(value)


def format_toml(value: Any) -> str:
    """Format a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's escapes are those of JSON, plus the delete character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Sequence):
        return "[" + ", ".join(format_toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {format_toml(item)}" for name, item in value.items()) + "}"
    return repr(value) if isinstance(value, int | float) else str(value)


def convert(hint: Any, value: Any) -> Any:
    """Convert `value` to the type `hint`, or raise TypeMismatch."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if _is_union(hint):  # a choice or a number
        given = value.value if isinstance(value, SettingText) else value
        words, number = arguments
        return convert(words if isinstance(given, str) else number, given)
    if isinstance(value, SettingText):
        value = value.parse(expect_text=str in (hint, *arguments) or origin is Literal)
    if origin is Literal:
        if value in arguments and isinstance(value, str):
            return value
        raise TypeMismatchError("is not one of the choices", did_you_mean(str(value), arguments))
    if origin is tuple:
        return _convert_list(arguments, value)
    return _convert_scalar(hint, value)


def _convert_list(arguments: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    # `path = "book.txt"` needs no brackets.
    items = value if isinstance(value, list | tuple) else [value]
    if arguments[-1] is Ellipsis:
        return tuple(convert(arguments[0], item) for item in items)
    if len(items) != len(arguments):
        raise TypeMismatchError(f"has {len(items)} values, not {len(arguments)}; write them as [a, b]")
    return tuple(convert(hint, item) for hint, item in zip(arguments, items, strict=True))


def _convert_scalar(hint: Any, value: Any) -> Any:
    if hint is str:
        if not isinstance(value, str):
            remedy = f"put it in quotes: {json.dumps(str(value))}"
            raise TypeMismatchError(f"is not a text but {_describe_type(type(value))}", remedy)
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise TypeMismatchError("is not valid Unicode text")
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise TypeMismatchError("is not a finite number")
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        raise TypeMismatchError("is not an integer", f"write {int(value)}")
    if type(value) is not hint:
        raise TypeMismatchError(f"is not {_describe_type(hint)}")
    if hint is int and not abs(value) <= MAX_INT64:
        raise TypeMismatchError(f"is out of range (at most {MAX_INT64} in size)")
    return value


def _unknown_key_issue(name: str, value: Any, table: Mapping[str, ConfigKey]) -> ValidationIssue:
    below = [key for key in table if key.startswith(name + ".")]
    if below:
        return ValidationIssue(name, format_given(value), "is a table, not a value", legal=", ".join(below))
    above, _, leaf = name.rpartition(".")
    siblings = [key for key in table if above and key.startswith(above + ".")]
    if not siblings:
        siblings = list(dict.fromkeys(key if "." not in key else key.partition(".")[0] + ".*" for key in table))
    # `lr` means `optimizer.lr`, although the spelling is far from it.
    same_leaf = [key for key in table if key.rpartition(".")[2] == leaf]
    suggestion = f'did you mean "{same_leaf[0]}"?' if len(same_leaf) == 1 else did_you_mean(name, table)
    legal = ", ".join(siblings)
    return ValidationIssue(name, format_given(value), "is not a known key", legal=legal, hint=suggestion)


def _has_effect(key: ConfigKey, values: Mapping[str, Any]) -> bool:
    return key.only_with is None or values[key.condition_key] in key.only_with.values


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def _describe_type(hint: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false", dict: "a table"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(arguments)
    if _is_union(hint):
        return " or ".join(_describe_type(part) for part in arguments)
    if origin is tuple:
        item = _describe_type(arguments[0]).split(" ", 1)[1] + "s"
        return f"a list of {item}" if arguments[-1] is Ellipsis else f"a list of {len(arguments)} {item}"
    return names.get(hint, f"a {hint.__name__}")


def _field_docs(cls: type) -> dict[str, str]:
    """Read the text under each field from the source of the class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for line, below in itertools.pairwise(body.body):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docs[line.target.id] = inspect.cleandoc(text)
    return docs
