"""`weightwire check-engine`"""

from __future__ import annotations

import click
import msgspec

from inference_plugin.cli.app import as_json_option
from inference_plugin.cli.output import line, print_json

__all__ = ["check_engine"]


@click.command("check-engine", short_help="Whether a release of an engine fits, before you install it.")
@click.argument("release", metavar="WHEEL_OR_VERSION")
@as_json_option
def check_engine(release: str, as_json: bool) -> None:
    """Says whether a release of an engine that is not installed has every place that the plug-in uses.

    WHEEL_OR_VERSION is a wheel or source archive of vLLM or SGLang, or a version such as vllm==0.32.0, which pip downloads. Its
    source is read; nothing of it is imported or installed. Exit status 1: it would be served without Weightwire.
    """
    from inference_plugin.engines.released import checked_by_name

    found = checked_by_name(release)
    if as_json:
        print_json(**msgspec.to_builtins(found), fits=found.fits)
    else:
        name = f"{found.distribution} {found.version}"
        for what in found.missing:
            line(f"MISSING: {what}", colour="red")
        for what in found.lacks:
            line(f"in this version {what}")
        if found.fits:
            tested = "the engine tests run with it" if found.run else "compared with its source only, not run"
            line(f"{name} has all {found.places} places; {tested}", colour="green")
        else:
            line(f"{name} lacks {len(found.missing)} of {found.places} places: it would serve without Weightwire")
    raise SystemExit(0 if found.fits else 1)
