"""A rank of a job that Accelerate trains under FSDP2: it saves after a step, or loads.

Arguments: `save` or `load`, and a folder. Accelerate itself takes ranks on a CPU for plain data
parallelism; here it is told that they are FSDP's.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, fsdp_utils

warnings.simplefilter("ignore")


def whole(value: object) -> object:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def main() -> None:
    action, folder = sys.argv[1], Path(sys.argv[2])
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    torch.manual_seed(0 if action == "save" else 7)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=33,
        tie_word_embeddings=False,
    )
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    if action == "save":
        tokens = torch.arange(8).reshape(1, 8)
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        given = plugin, accelerator, model
        fsdp_utils.save_fsdp_model(*given, folder / "files", use_dcp=False)
        fsdp_utils.save_fsdp_optimizer(
            plugin, accelerator, optimizer, model, folder / "files", use_dcp=False
        )
        fsdp_utils.save_fsdp_model(*given, folder / "dcp")
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder / "dcp")
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        state = {
            f"{names[id(parameter)]}.{key}": whole(value)
            for parameter, own in optimizer.state.items()
            for key, value in own.items()
        }
        weights = {name: whole(value) for name, value in model.state_dict().items()}
        if accelerator.is_main_process:
            torch.save({"weights": weights, "state": state}, folder / "whole.pt")
    else:
        expected = torch.load(folder / "whole.pt", weights_only=True)["weights"]
        for source, is_dcp in (("converted dcp", True), ("converted files", False)):
            for parameter in model.parameters():
                torch.nn.init.zeros_(parameter)
            fsdp_utils.load_fsdp_model(plugin, accelerator, model, folder / source, use_dcp=is_dcp)
            for name, value in model.state_dict().items():
                if not torch.equal(whole(value), expected[name]):
                    raise SystemExit(f"{source}: {name} is another")
    accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
