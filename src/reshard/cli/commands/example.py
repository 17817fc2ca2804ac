"""`reshard example`: a tiny model for first steps."""

from __future__ import annotations

import math

import click

from reshard.cli import output
from reshard.cli.options import as_path, json_option, quiet_option
from reshard.cli.program import DONE
from reshard.text import bytes_text, count_text, printable


@click.command()
@click.argument("folder", type=click.Path(), callback=as_path)
@json_option
@quiet_option
def example(folder: str, as_json: bool, quiet: bool) -> int:
    """Write a tiny Llama with random weights into FOLDER.

    FOLDER gets config.json and model.safetensors, as Hugging Face stores a model: 2 layers, 8
    heads over 4 key/value heads, float32, less than a megabyte. The weights are the same in every
    run. FOLDER must be new or empty.

    \b
    Examples:
      reshard example model
      reshard example model && reshard convert model model-tp4 --to tp=4

    \b
    Keys of --json:
      path, model_type, tensors, elements, size_bytes, files
    """
    from reshard.checkpoint.example_model import CONFIG_FILE, write_example_model
    from reshard.checkpoint.formats.safetensors.huggingface import SINGLE_FILE, read_single

    path = write_example_model(folder)
    weights = path / SINGLE_FILE
    tensors = read_single(weights).tensors
    elements = sum(math.prod(tensor.shape) for tensor in tensors.values())
    size_bytes = weights.stat().st_size
    if as_json:
        output.write_json(
            {
                "path": folder,
                "model_type": "llama",
                "tensors": len(tensors),
                "elements": elements,
                "size_bytes": size_bytes,
                "files": [CONFIG_FILE, SINGLE_FILE],
            }
        )
    elif not quiet:
        output.write(
            f"{printable(folder)}: a Llama of {count_text(len(tensors))} tensors with "
            f"{count_text(elements)} elements, {bytes_text(size_bytes)}, in {CONFIG_FILE} and "
            f"{SINGLE_FILE}"
        )
    return DONE
