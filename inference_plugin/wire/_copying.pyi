from typing import Any

def copy_rows(
    target: Any,
    target_start: int,
    target_stride: int,
    source: Any,
    source_start: int,
    source_stride: int,
    rows: int,
    row_bytes: int,
    streaming: bool,
    /,
) -> None: ...
def copy_rows_and_digest(
    target: Any, target_start: int, target_stride: int, source: Any, rows: int, row_bytes: int, /
) -> int | None: ...
def copy_strided_and_digest(
    target: Any, target_start: int, target_stride: int, source: Any, rows: int, row_bytes: int, source_stride: int, /
) -> int | None: ...
def copy_joined(target: Any, start: int, addresses: list[int], sizes: list[int], /) -> int | None: ...
def has_all_bits(source: Any, width: int, mask: int, /) -> bool: ...
def digest_rows(source: Any, stride: int, rows: int, spans: list[tuple[int, int]], /) -> list[int] | None: ...
def tensor_rows(
    tensors: tuple[object, ...], kind: type, exchange: object, /
) -> tuple[list[int], list[int], tuple[int, ...], tuple[int, ...]] | None: ...
