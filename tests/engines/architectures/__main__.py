"""Write the records of model types: `python -m engines.architectures [TYPE...]`."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engines.architectures.probing import collect, find_classes
from engines.architectures.recording import make_record, write_record
from reshard.recipes.library import load_recipe, shipped_recipes

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model_types", nargs="*")
given = parser.parse_args()
warnings.simplefilter("ignore")
logging.disable(logging.ERROR)
shipped = {kind for name in shipped_recipes() for kind in load_recipe(name).model_types}
for model_type in given.model_types or sorted(shipped & {*CONFIG_MAPPING}):
    classes = find_classes(model_type)
    record = make_record(classes, collect(classes), transformers.__version__)
    write_record(model_type, record)

    sys.stdout.write(f"{model_type}: {len(record['classes'])} classes\n")
