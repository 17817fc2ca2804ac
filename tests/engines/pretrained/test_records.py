"""Model folders made of what real programs saved: `from_pretrained` gives the live model.

The records are those that `make test` reads too (`record.py`): weights are equal bit for bit, and
so are outputs, but for Megatron's, whose own forward pass rounds sums in another order.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

if os.environ.get("RESHARD_ENGINE") != "transformers":
    pytest.skip("needs transformers", allow_module_level=True)

import torch
import transformers

from engines.pretrained.small_llama import SAVED, TOKENS, read_record
from reshard.checkpoint import plan_for_pretrained, run_conversion

EVERY = [(name, saved) for name, of in SAVED.items() for saved in of]


@pytest.mark.parametrize(("name", "saved"), EVERY, ids=lambda one: one)
def test_from_pretrained_gives_the_live_model(name: str, saved: str, tmp_path: Path) -> None:
    record = read_record(name, tmp_path)
    live = torch.load(record / "live.pt")
    (dtype,) = {one.dtype for one in live.values()}
    asked = {"dtype": "bf16"} if saved == "universal" else {}
    run_conversion(
        plan_for_pretrained(record / saved, tmp_path / "hf", config=record / "config.json", **asked)
    )
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    assert model.dtype == dtype
    found = model.state_dict()
    assert found.keys() - {"lm_head.weight"} == live.keys() - {"lm_head.weight"}
    for key, tensor in live.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor(TOKENS)).logits.float()
    expected = torch.tensor(json.loads((record / "logits.json").read_text()))
    # The weights are equal bit by bit. Logits are rounded differently by other processors than that
    # of the record, and by Megatron's own kernels.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
