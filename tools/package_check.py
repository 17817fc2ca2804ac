"""Install the built packages into empty environments and use them: `make package-check`.

The wheel is installed with each extra, and the source archive and a clone with the command. Each
environment runs `pip check` and a program that uses the extra; the command runs the README's
quickstart, whose output is compared. vllm is several gigabytes, and so only the wheel's metadata is
checked for it. A file of constraints, if given, selects the versions, such as torch's.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / "build" / "package-check"

_PLAN = """
import reshard
mesh = reshard.DeviceMesh.of(x=2, y=3)
source, target = (reshard.spec(mesh, text).layout((6, 6)) for text in ("x, y", "y, x"))
assert reshard.plan(source, target).moved_elements == 26
"""
_ARRAYS = """
import numpy, reshard, reshard.spmd as sp
mesh = reshard.DeviceMesh.of(x=2)
x = sp.array({array}, reshard.spec(mesh, "x, -"))
assert float(sp.sum(x)) == 12.0
"""
_CONVERSION = """
import reshard
from reshard.checkpoint.example_model import write_example_model
write_example_model("model")
options = {{"to": "tp=2", "recipe": "auto", "dtype": "bf16", "format": {format!r}}}
reshard.checkpoint.convert("model", "new", **options)
assert reshard.checkpoint.load("new")["lm_head.weight"].dtype == "bfloat16"
"""
#: A program for each extra; `None` runs the quickstart of the README.
PROGRAMS: dict[str, str | None] = {
    "": _PLAN,
    "cli": None,
    "checkpoint": _CONVERSION.format(format=None),
    "orbax": _CONVERSION.format(format="orbax"),
    "planning": _PLAN + "import scipy.optimize",
    "spmd": _ARRAYS.format(array="numpy.ones((4, 3))") + "import array_api_compat",
    "s3": "import obstore, boto3, reshard.checkpoint",
    "gcs": "import obstore, google.cloud.storage, reshard.checkpoint",
    "azure": "import obstore, azure.storage.blob, reshard.checkpoint",
    "hf": "import obstore, huggingface_hub, reshard.checkpoint",
    "torch": "import torch, reshard.torch\n" + _ARRAYS.format(array="torch.ones((4, 3))"),
    "jax": _PLAN + "import jax\n"
    "mesh = jax.make_mesh((1,), ('x',))\n"
    "named = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))\n"
    "assert str(reshard.sharding_of(named, shape=(4,))) == 'x'",
}
#: Extras whose metadata alone is checked: too large, or made of others.
BY_METADATA = {"vllm": {"reshard[torch]", "vllm>=0.30"}}
FOR_DEVELOPMENT = {"test", "site", "soak", "all"}
_MEASURED = re.compile(r"[\d.,]+ (?:µs|ms|s|min|[kMG]?B/s)(?!\w)")


def read_quickstart(readme: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the installation commands of the quickstart, and its commands with their output.

    >>> text = "## Quickstart\\n```sh\\npip install x\\n```\\n```console\\n$ a b\\nc\\n```\\n"
    >>> read_quickstart(text)
    (['pip install x'], [('a b', 'c\\n')])
    """
    text = readme.partition("## Quickstart\n")[2].partition("\n## ")[0]
    install = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    session = "".join(re.findall(r"^```console\n(.*?)^```", text, re.M | re.S))
    parts = [part.partition("\n") for part in re.split(r"^\$ ", session, flags=re.M)[1:]]
    return [line for block in install for line in block.splitlines()], [
        (command, output) for command, _, output in parts
    ]


def find_missing(metadata: str) -> list[str]:
    """Return what the wheel's metadata lacks: extras without a program, requirements, a licence.

    >>> find_missing("Provides-Extra: new\\n")[0]
    "extra 'new' has no program in tools/package_check.py"
    """
    message = email.message_from_string(metadata)
    extras = {*message.get_all("Provides-Extra", [])}
    unknown = extras - PROGRAMS.keys() - BY_METADATA.keys() - FOR_DEVELOPMENT
    missing = [f"extra {name!r} has no program in tools/package_check.py" for name in unknown]
    required = [
        text.replace('"', "'").replace(" ", "") for text in message.get_all("Requires-Dist", [])
    ]
    for extra, requirements in BY_METADATA.items():
        missing += [
            f"extra {extra!r} does not require {text}"
            for text in sorted(requirements)
            if f"{text};extra=='{extra}'" not in required
        ]
    if message["License-Expression"] != "Apache-2.0" or not message["License-File"]:
        missing.append("no licence: expected License-Expression Apache-2.0 and License-File")
    return missing


def check_case(name: str, requirement: str, program: str | None, constraint: str | None) -> None:
    """Install a requirement into an empty environment, and run a program or the quickstart there.

    Raises SystemExit with the output of a command that fails.
    """
    began = time.monotonic()
    folder = ENVIRONMENTS / name
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    constraints = ["--constraint", constraint] if constraint else []
    _run([*pip, "install", *constraints, requirement], ROOT)
    _run([*pip, "check"], ROOT)
    with tempfile.TemporaryDirectory() as text:
        work = Path(text)
        if program is not None:
            _run([str(python), "-c", program], work)
        else:
            for command, output in read_quickstart((ROOT / "README.md").read_text("utf-8"))[1]:
                word, *arguments = shlex.split(command)
                found = _run([str(folder / "bin" / word), *arguments], work)
                if _comparable(found) != _comparable(output):
                    raise SystemExit(f"{name}: {command}\nREADME.md:\n{output}\nfound:\n{found}")
    shutil.rmtree(folder)
    print(f"{name}: works, {time.monotonic() - began:.0f} s", flush=True)


def _comparable(text: str) -> str:
    lines = [line.rstrip() for line in _MEASURED.sub("N", text).splitlines()]
    return "\n".join(lines).strip("\n")


def _run(command: list[str], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONSAFEPATH": "1", "PYTHONUTF8": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Check the wheel and the source archive in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dist", type=Path)
    parser.add_argument("--constraint")
    parser.add_argument(
        "--only",
        action="append",
        metavar="CASE",
        help="wheel, archive, clone or an extra; repeatable",
    )
    arguments = parser.parse_args()
    (wheel,), (archive,) = arguments.dist.glob("*.whl"), arguments.dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        (path,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        if missing := find_missing(file.read(path).decode()):
            raise SystemExit("\n".join(missing))
    print(f"{wheel.name}: its metadata has the licence and each extra", flush=True)
    constraint = os.path.abspath(arguments.constraint) if arguments.constraint else None
    address = f"reshard[{{}}] @ {wheel.absolute().as_uri()}"
    cases = {
        extra or "wheel": (address.format(extra).replace("[]", ""), program)
        for extra, program in PROGRAMS.items()
    }
    cases["archive"] = (f"reshard[cli] @ {archive.absolute().as_uri()}", None)
    with tempfile.TemporaryDirectory() as clone:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), clone], check=True)
        (install,) = read_quickstart((ROOT / "README.md").read_text("utf-8"))[0]
        # The clone's path in place of the dot: `pip install '.[cli]'`.
        cases["clone"] = (shlex.split(install)[-1].replace(".", clone, 1), None)
        chosen = arguments.only or [*cases]
        if unknown := {*chosen} - cases.keys():
            raise SystemExit(f"no case {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
        for name in chosen:
            check_case(name, *cases[name], constraint)


if __name__ == "__main__":
    sys.exit(main())
