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
