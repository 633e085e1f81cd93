"""The documents in files, as `moiety prepare` finds them, and in Parquet."""

import gzip
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

from .prepare_errors import DataError, UsageError

CHUNK = 1 << 20


class BadDocument(Exception):
    """A document that --skip-bad leaves out."""


def list_inputs(inputs: Any) -> Any:
    """The files, in order, without repetitions, and how many of these there were."""
    files, seen, repeated = [], set(), 0
    for given in inputs:
        if given != "-" and not os.path.exists(given):
            raise DataError(f"{given}: No such file or directory")
        for path in _below(given) if given != "-" and os.path.isdir(given) else [given]:
            identity = path if path == "-" else os.path.realpath(path)
            repeated += identity in seen
            if identity not in seen:
                files.append(path)
            seen.add(identity)
    return files, repeated


def _below(directory: Any) -> Any:
    files = []
    for folder, folders, names in os.walk(directory):
        folders[:] = [f for f in folders if not f.startswith(".")]
        paths = [os.path.join(folder, name) for name in names]
        files += [p for p, name in zip(paths, names) if not name.startswith(".") and not name.endswith(".tok")
                  and os.path.isfile(p)]  # fmt: skip
    return sorted(files, key=os.fsencode)


def _open(path: Any) -> Any:
    file: Any = sys.stdin.buffer if path == "-" else open(path, "rb")
    head = file.peek(4)[:4]
    if head[:2] == b"\x1f\x8b":
        return gzip.open(file, "rb")
    if head == b"\x28\xb5\x2f\xfd":
        return _open_zstd(file, path)
    return file


def _open_zstd(file: Any, path: Any) -> Any:
    try:
        from compression import zstd  # Python 3.14

        return zstd.open(file, "rb")
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError:
        raise UsageError(f"{path}: is zstd, which needs the package zstandard: pip install zstandard") from None
    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)


def _pieces(file: Any, separator: Any) -> Iterator[Any]:
    """What stands between the separators; without one, the whole file. Nothing behind the last."""
    if not separator:
        whole = file.read()
        if whole:
            yield whole
        return
    rest = b""
    while chunk := file.read(CHUNK):
        *whole, rest = (rest + chunk).split(separator)
        yield from whole
    if rest:
        yield rest


def _refuse_constant(word: Any) -> None:
    raise ValueError(f"{word} is no JSON")


def _number(word: Any) -> Any:
    value = float(word)
    if math.isinf(value):
        raise ValueError("a number is beyond double")
    return value


class _Object(list[Any]):
    """The pairs of a JSON object, in which a key may stand several times."""

    def value(self, key: Any) -> Any:
        values = [v for k, v in self if k == key]
        if not values:
            raise BadDocument(f"no key '{key}'")
        if len(values) > 1:
            raise BadDocument(f"key '{key}' stands {len(values)} times")
        return values[0]


def parse_object(line: Any) -> Any:
    """The pairs of the object on a line."""
    try:
        text = line.decode().removeprefix("\ufeff")
        value = json.loads(
            text, object_pairs_hook=_Object, parse_constant=_refuse_constant, parse_float=_number,
            parse_int=lambda word: (_number(word), int(word))[1] if len(word) < 400 else _number(word),
        )  # fmt: skip
    except (ValueError, RecursionError) as e:
        raise BadDocument(f"bad JSON or UTF-8: {e}") from None
    if not isinstance(value, _Object):
        raise BadDocument("is no JSON object")
    return value


def check_text(value: Any, key: Any) -> Any:
    """The value, if it is a text that UTF-8 can spell."""
    if not isinstance(value, str):
        raise BadDocument(f"'{key}' is a {type(value).__name__}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise BadDocument(f"'{key}': half a surrogate pair: {e}") from None
    return value


def is_parquet(path: Any, form: str) -> Any:
    return form == "parquet" or (form == "auto" and path.endswith(".parquet"))


def _is_jsonl(path: Any, form: str) -> Any:
    if form != "auto":
        return form == "jsonl"
    for packed in (".gz", ".dz", ".zst"):
        path = path.removesuffix(packed)
    return path.endswith(".jsonl")


def records(path: Any, form: str, keys: Any, separator: Any) -> Iterator[Any]:
    """Of each document its place, and its text, a dict of the wanted values, or a BadDocument. `keys`
    gives the wanted names of those that are there, or raises a BadDocument."""
    if is_parquet(path, form):
        yield from _table(path, keys)
        return
    try:
        with _open(path) as file:
            if _is_jsonl(path, form):
                yield from _lines(file, path, keys)
            else:
                for i, piece in enumerate(_pieces(file, separator)):
                    yield f"{path}: document {i + 1}", _decoded(piece)
    except (OSError, EOFError) as e:
        raise DataError(f"{path}: {e}") from None


def _decoded(piece: Any) -> Any:
    try:
        return piece.decode()
    except UnicodeDecodeError as e:
        return BadDocument(f"not UTF-8: {e}")


def _lines(file: Any, path: Any, keys: Any) -> Iterator[Any]:
    for i, line in enumerate(_pieces(file, b"\n")):
        if not line.strip(b" \t\r"):
            continue
        place = f"{path}: line {i + 1}"
        try:
            record = parse_object(line)
            yield place, {key: record.value(key) for key in keys([k for k, _ in record])}
        except BadDocument as e:
            yield place, e


def _table(path: Any, keys: Any) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError(f"{path}: Parquet needs the package pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            try:
                columns = keys(names)
            except BadDocument as e:
                raise DataError(f"{path}: {e}; its columns are {', '.join(names)}") from None
            if missing := [column for column in columns if column not in names]:
                raise DataError(f"{path}: no column '{missing[0]}'; there are {', '.join(names)}")
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    yield f"{path}: row {row}", record
    except (pyarrow.ArrowException, OSError) as e:
        raise DataError(f"{path}: {e}") from None


def text_of(record: Any, keys: Any) -> Any:
    """The text of a record; of several keys, the texts below each other."""
    if isinstance(record, BadDocument):
        raise record
    return record if isinstance(record, str) else "\n".join(check_text(record[key], key) for key in keys)
