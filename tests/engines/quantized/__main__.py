"""Write the records: `RESHARD_ENGINE=quantization python -m engines.quantized`."""

from importlib.metadata import PackageNotFoundError, version

from engines.quantized.library import FORMATS
from engines.quantized.records import Record, write_record

PACKAGES = ("torch", "transformers", "compressed-tensors", "nvidia-modelopt", "bitsandbytes")


def versions() -> dict[str, str]:
    """Of the libraries that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


for name, one in FORMATS.items():
    stored, config = one.make()
    write_record(name, Record(stored, config, one.values(stored)), versions())
