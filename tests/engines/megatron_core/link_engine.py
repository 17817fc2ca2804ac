"""A module of transformers that a trainer fills by a link, and what it computes then.

Usage: python link_engine.py CONFIG.json URL GIVEN RESULT [FOLDER]. GIVEN has tokens; RESULT gets
logits, and the weights as transformers saves them; FOLDER gets a saved model. The module is given
as it is: nothing is named.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    from reshard.torch import connect

    values = json.loads(Path(sys.argv[1]).read_text())
    kind = values.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **values)
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with connect(sys.argv[2], "engine", rank=0, ranks=1) as link:
        sync = link.prepare(model)
        sync.run()
        sync.verify()
    with torch.no_grad():
        logits = model(torch.load(sys.argv[3])["tokens"]).logits
    if len(sys.argv) > 5:
        model.save_pretrained(sys.argv[5])
    state = revert_weight_conversion(model, dict(model.state_dict()))
    saved = {name: tensor.clone() for name, tensor in state.items()}
    torch.save({"logits": logits, "saved": saved}, sys.argv[4])


if __name__ == "__main__":
    main()
    os._exit(0)
