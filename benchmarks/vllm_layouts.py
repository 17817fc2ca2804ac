"""Layouts of vLLM's ranks for models of 70 to 1,000 billion parameters: seconds and memory.

    python benchmarks/vllm_layouts.py llama-70b deepseek-v3 kimi-k2

No weights are needed: names and shapes follow from the configuration. Each case is a process of its
own, in the environment that has vLLM (RESHARD_VLLM_PYTHON, or the Python that runs this). Printed
are: seconds of all, of which the import of vLLM; the peak of resident memory of the process that
traces; parameters of all ranks; bytes of the document.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
KIMI_K2: dict[str, Any] = {
    **DEEPSEEK_V3,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 163840,
}
CASES: dict[str, list[tuple[dict[str, Any], dict[str, int]]]] = {
    "llama-70b": [(LLAMA_70B, {"tp": 16})],
    "deepseek-v3": [(DEEPSEEK_V3, {"tp": 16}), (DEEPSEEK_V3, {"tp": 16, "dp": 2, "ep": 32})],
    "kimi-k2": [(KIMI_K2, {"tp": 16}), (KIMI_K2, {"tp": 16, "dp": 2, "ep": 32})],
}


def list_sources(config: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """Names and shapes of a checkpoint, as the Hub has it, in bfloat16."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    found: dict[str, list[int]] = {"model.embed_tokens.weight": [vocabulary, hidden]}
    heads = config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found[f"{at}.input_layernorm.weight"] = [hidden]
        found[f"{at}.post_attention_layernorm.weight"] = [hidden]
        attention = f"{at}.self_attn"
        if "kv_lora_rank" in config:
            query, latent = config["q_lora_rank"], config["kv_lora_rank"]
            nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
            value = config["v_head_dim"]
            found |= {
                f"{attention}.q_a_proj.weight": [query, hidden],
                f"{attention}.q_a_layernorm.weight": [query],
                f"{attention}.q_b_proj.weight": [heads * (nope + rope), query],
                f"{attention}.kv_a_proj_with_mqa.weight": [latent + rope, hidden],
                f"{attention}.kv_a_layernorm.weight": [latent],
                f"{attention}.kv_b_proj.weight": [heads * (nope + value), latent],
                f"{attention}.o_proj.weight": [hidden, heads * value],
            }
        else:
            head = hidden // heads
            for part, count in (("q", heads), ("k", 0), ("v", 0)):
                rows = (count or config["num_key_value_heads"]) * head
                found[f"{attention}.{part}_proj.weight"] = [rows, hidden]
            found[f"{attention}.o_proj.weight"] = [hidden, heads * head]
        if layer < config.get("first_k_dense_replace", layer + 1):
            found |= _list_mlp(f"{at}.mlp", hidden, config["intermediate_size"])
            continue
        width = config["moe_intermediate_size"]
        found[f"{at}.mlp.gate.weight"] = [config["n_routed_experts"], hidden]
        found[f"{at}.mlp.gate.e_score_correction_bias"] = [config["n_routed_experts"]]
        shared = width * config["n_shared_experts"]
        found |= _list_mlp(f"{at}.mlp.shared_experts", hidden, shared)
        for expert in range(config["n_routed_experts"]):
            found |= _list_mlp(f"{at}.mlp.experts.{expert}", hidden, width)
    found |= {"model.norm.weight": [hidden], "lm_head.weight": [vocabulary, hidden]}
    return {name: ("bfloat16", shape) for name, shape in found.items()}


def _list_mlp(at: str, hidden: int, width: int) -> dict[str, list[int]]:
    return {
        f"{at}.gate_proj.weight": [width, hidden],
        f"{at}.up_proj.weight": [width, hidden],
        f"{at}.down_proj.weight": [hidden, width],
    }


def trace(request_path: str) -> None:
    """Trace one case in this process, and print its figures."""
    import resource

    begun, begun_cpu = time.perf_counter(), time.process_time()
    from reshard.plans.serialization import to_json
    from reshard.torch.vllm.tracing_process import prepare_process, trace_ranks

    prepare_process()
    import vllm.model_executor.model_loader.utils  # noqa: F401

    imported_s, imported_cpu_s = (
        time.perf_counter() - begun,
        time.process_time() - begun_cpu,
    )
    layout = trace_ranks(json.loads(Path(request_path).read_text()))
    traced_s = time.perf_counter() - begun
    text = to_json(layout)
    figures = {
        "import_s": round(imported_s, 1),
        "trace_s": round(traced_s - imported_s, 1),
        "trace_cpu_s": round(time.process_time() - begun_cpu - imported_cpu_s, 1),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "ranks": len(layout.ranks),
        "parameters": sum(len(one.parameters) for one in layout.ranks),
        "sources": len(layout.sources),
        "document_bytes": len(text),
    }
    print(json.dumps(figures))


def main() -> None:
    python = os.environ.get("RESHARD_VLLM_PYTHON", sys.executable)
    for name in sys.argv[1:] or CASES:
        for config, sizes in CASES[name]:
            with tempfile.TemporaryDirectory() as scratch:
                Path(scratch, "config.json").write_text(json.dumps(config))
                request = {
                    "folder": scratch,
                    "sources": list_sources(config),
                    "dtype": "auto",
                    "tp": 1,
                    "pp": 1,
                    "ep": 1,
                    "dp": 1,
                    **sizes,
                }
                path = Path(scratch, "request.json")
                path.write_text(json.dumps(request))
                paths = ["src", *filter(None, [os.environ.get("PYTHONPATH")])]
                run = subprocess.run(
                    [python, __file__, "--trace", str(path)],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                    capture_output=True,
                    text=True,
                    check=False,
                )
                lines = run.stdout.strip().splitlines()
                print(name, sizes, lines[-1] if not run.returncode else run.stderr[-600:])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trace"]:
        trace(sys.argv[2])
    else:
        main()
