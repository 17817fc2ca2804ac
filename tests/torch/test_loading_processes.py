"""Jobs of real processes load checkpoints of any number of ranks, and from addresses together."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from live_processes import expect_all_end_well, run_ranks
from object_server import object_server
from reshard import checkpoint
from selection import keep_spread

pytest.importorskip("torch")


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_one_to_four_ranks_load_a_checkpoint(tmp_path: Path, processes: int) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_file(
        model / "model.safetensors", {"w": tensor("int32", (9, 10)), "b": tensor("int8", (7,))}
    )
    folders = [model]
    for ranks in (2, 3, 4):
        folders.append(tmp_path / f"tp{ranks}")
        checkpoint.convert(model, folders[-1], to=f"tp={ranks}", rules=["*=tp, ..."])
    expect_all_end_well(run_ranks("loading_process.py", processes, model, *folders))


@pytest.mark.parametrize("dtype", keep_spread(1, ("bfloat16", "float32"), "without a cast"))
def test_data_that_several_ranks_need_is_requested_once(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("obstore")
    from safetensors.torch import save_file

    from vllm_rank_model import make_weights

    weights = make_weights()
    save_file(weights, tmp_path / "model.safetensors")
    model_bytes = sum(one.nbytes for one in weights.values())
    with object_server() as server:
        server.objects["/m/model.safetensors"] = (tmp_path / "model.safetensors").read_bytes()
        ended = run_ranks("address_loading_process.py", 2, tmp_path, f"{server.url}/m", dtype)
        expect_all_end_well(ended)
        # What is cast and padded is loaded by vLLM's own loader, whole on each rank; so is `A_log`.
        by_loader = weights["A_log"].nbytes
        by_loader += weights["embedding"].nbytes if dtype == "float32" else 0
        expected_bytes = model_bytes + by_loader
        # Loaded three times, the last one without vectors; and headers by each rank.
        least_bytes = expected_bytes + 2 * model_bytes - 2 * 2 * 16
        headers_bytes = 3 * 2 * 2 * 256 * 1024
        assert least_bytes <= server.sent_bytes <= 1.05 * least_bytes + headers_bytes
    asked = sum(int(one.output.split("asked ")[1].split()[0]) for one in ended)
    assert expected_bytes <= asked <= 1.05 * expected_bytes
