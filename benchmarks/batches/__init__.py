"""The ways that `benchmarks.batch` measures: `data` is what they carry, each other module a way or a part of one."""
