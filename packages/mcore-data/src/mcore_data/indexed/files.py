"""Whole files: several into one, one into several."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from mcore_data.indexed.reader import IndexedReader
from mcore_data.indexed.writer import IndexedWriter


def merge(prefixes: Sequence[str | Path], output: str | Path) -> None:
    """Write the documents of all `prefixes`, in order, to `output.bin` and `output.idx`.

    Memory does not grow with the files, and nothing appears under the final names unless all of
    it succeeds. ValueError, naming the file, when there is none, one cannot be read or its index
    is inconsistent, when they differ in dtype or in having modes, or when `output` is one of them.
    """
    if not prefixes:
        raise ValueError("nothing to merge: give at least one prefix")
    with ExitStack() as stack:
        readers = [stack.enter_context(IndexedReader(prefix)) for prefix in prefixes]
        modes = any(reader.modes is not None for reader in readers)
        first = next((reader for reader in readers if len(reader)), readers[0])
        for reader in readers:
            reader.verify()
            if Path(reader.bin_path).resolve() == Path(f"{output}.bin").resolve():
                raise ValueError(f"{output}: it is one of the files to merge, give another name")
            # A file without sequences does not tell whether it has modes.
            other_modes = len(reader) > 0 and (reader.modes is None) == modes
            if reader.dtype != first.dtype or other_modes:
                raise ValueError(
                    f"{reader.prefix} holds {_kind(reader)}, {first.prefix} holds {_kind(first)}: "
                    "files of one kind can be merged"
                )
        writer = stack.enter_context(IndexedWriter(output, first.dtype, multimodal=modes))
        for reader in readers:
            writer.append(reader)


def split(prefix: str | Path, outputs: Mapping[str | Path, range]) -> None:
    """Write ranges of the documents of `prefix` to files of their own, by output prefix.

    ValueError as for `merge`, and for documents that the file does not have.
    """
    with IndexedReader(prefix) as reader:
        reader.verify()
        for output, documents in outputs.items():
            if Path(reader.bin_path).resolve() == Path(f"{output}.bin").resolve():
                raise ValueError(f"{output}: it is the file to split, give another name")
            with IndexedWriter(output, reader.dtype, multimodal=reader.modes is not None) as writer:
                writer.append(reader, documents)


def _kind(reader: IndexedReader) -> str:
    return reader.dtype.name + (" with modes" if reader.modes is not None else "")
