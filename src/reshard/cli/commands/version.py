"""`reshard version`: the versions of reshard and of the packages that it uses."""

from __future__ import annotations

import platform
from importlib import metadata

import click

from reshard import __version__
from reshard.cli import output
from reshard.cli.options import json_option
from reshard.cli.program import DONE
from reshard.plugins import FORMATS, RECIPES
from reshard.text import printable

#: Distributions that some part of reshard uses, or whose checkpoints it reads.
PACKAGES = (
    *("numpy", "click", "rich", "ml_dtypes", "xxhash", "zlib-ng", "zstandard", "safetensors"),
    *("array-api-compat", "scipy", "torch", "jax", "jaxlib", "obstore", "boto3"),
    *("google-cloud-storage", "azure-storage-blob", "huggingface_hub", "transformers", "vllm"),
    *("deepspeed", "megatron-core", "orbax-checkpoint", "tensorstore", "torchao", "peft"),
)


@click.command()
@click.option(
    "--all", "shows_all", is_flag=True, help="Also show Python, the platform and packages."
)
@json_option
def version(shows_all: bool, as_json: bool) -> int:
    """Show the version of reshard, and with --all of what it uses.

    With --all: Python, the operating system, packages, and plug-ins. Versions are read from the
    metadata of the packages; none is imported. Include the output in a report of a problem.

    \b
    Examples:
      reshard version
      reshard version --all

    \b
    Keys of --json:
      reshard, python, platform, packages, not_installed, plugins (empty without --all)
    """
    installed = _find_versions() if shows_all else {}
    python = f"{platform.python_version()} ({platform.python_implementation()})"
    missing = [name for name in PACKAGES if name not in installed] if shows_all else []
    plugins = _find_plugins() if shows_all else []
    if as_json:
        output.write_json(
            {
                "reshard": __version__,
                "python": python if shows_all else None,
                "platform": platform.platform() if shows_all else None,
                "packages": installed,
                "not_installed": missing,
                "plugins": plugins,
            }
        )
        return DONE
    lines = [f"reshard {__version__}"]
    if shows_all:
        lines += [f"Python {python}", platform.platform()]
        lines += [f"{name} {printable(text)}" for name, text in installed.items()]
        lines += [f"plug-in {printable(text)}" for text in plugins]
        lines.append(f"not installed: {', '.join(missing)}")
    output.write("\n".join(lines))
    return DONE


def _find_versions() -> dict[str, str]:
    """Return the versions of the packages that are installed, without importing them."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _find_plugins() -> list[str]:
    """Return the plug-ins of other packages, by name, without importing them."""
    points = [*metadata.entry_points(group=FORMATS), *metadata.entry_points(group=RECIPES)]
    packages = [(point, point.dist) for point in points]
    return sorted(
        f"{point.name} of {distribution.name} {distribution.version}"
        if distribution
        else point.name
        for point, distribution in packages
    )
