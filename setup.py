"""What pyproject.toml can't say: one C file, left out where there is no compiler (then numpy copies)."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "inference_plugin.wire._copying",
            ["inference_plugin/wire/_copying.c"],
            extra_compile_args=["-O3", "-std=c11"],
            optional=True,
        )
    ]
)
