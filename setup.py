"""What pyproject.toml can't say: one C file, left out where there is no compiler (then numpy copies).

A wheel with it is for this platform and for every Python from 3.11 on (the stable ABI); a wheel without it is for all platforms.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

FIRST_PYTHON = "cp311"

COPYING = Extension(
    "inference_plugin.wire._copying",
    ["inference_plugin/wire/_copying.c"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    extra_compile_args=["-O3", "-std=c11"],
    py_limited_api=True,
    optional=True,
)


class TaggedWheel(bdist_wheel):
    """A wheel whose tag says whether the compiled file is in it."""

    def run(self) -> None:
        self.run_command("build_ext")
        if not Path(self.get_finalized_command("build_ext").get_ext_fullpath(COPYING.name)).exists():
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()


setup(
    ext_modules=[COPYING],
    cmdclass={"bdist_wheel": TaggedWheel},
    options={"bdist_wheel": {"py_limited_api": FIRST_PYTHON}},
)
