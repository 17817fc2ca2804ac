"""Small quantised weights, made and dequantised by the libraries that define their formats.

A format makes the stored tensors of a weight `X.weight`, by the ends of their names, with the
`quantization_config`, and gives the values that the library makes of them, or of a rank's part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Tensors = dict[str, torch.Tensor]
OUT, IN = 96, 224
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Format(NamedTuple):
    """A format: `make` gives stored tensors and what config.json says, `values` their values."""

    make: Callable[[], tuple[Tensors, dict[str, Any]]]
    values: Callable[[Tensors], torch.Tensor]


def make_weight(rows: int = OUT, columns: int = IN) -> torch.Tensor:
    """The same random weight for all."""
    torch.manual_seed(13)
    return torch.randn(rows, columns)


def make_block_fp8() -> tuple[Tensors, dict[str, Any]]:
    """As DeepSeek-V3's weights are."""
    weight = make_weight(256, 384)
    scales = weight.view(2, 128, 3, 128).abs().amax((1, 3)) / 448
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    stored = {".weight": (weight / wide).to(torch.float8_e4m3fn), ".weight_scale_inv": scales}
    return stored, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def dequantize_block_fp8(stored: Tensors) -> torch.Tensor:
    """transformers: `Fp8Dequantize` of its FP8 models."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    parts = (stored[".weight"], stored[".weight_scale_inv"])
    return Fp8Dequantize(None)._dequantize_one(*parts, torch.bfloat16)


def make_mxfp4() -> tuple[Tensors, dict[str, Any]]:
    """A stack of two experts of gpt-oss."""
    torch.manual_seed(13)
    blocks = torch.randint(0, 256, (2, OUT, IN // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 135, (2, OUT, IN // 32), dtype=torch.uint8)
    return {"_blocks": blocks, "_scales": scales}, {"quant_method": "mxfp4"}


def dequantize_mxfp4(stored: Tensors) -> torch.Tensor:
    """transformers: `convert_moe_packed_tensors` of gpt-oss."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(stored["_blocks"], stored["_scales"], dtype=torch.bfloat16)


def make_nvfp4() -> tuple[Tensors, dict[str, Any]]:
    """NVIDIA ModelOpt: `NVFP4QTensor`."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    made, scale, double = NVFP4QTensor.quantize(make_weight(), 16)
    stored = {
        ".weight": made._quantized_data,
        ".weight_scale": scale,
        ".weight_scale_2": double,
        ".input_scale": torch.tensor(0.5),
    }
    return stored, {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def dequantize_nvfp4(stored: Tensors) -> torch.Tensor:
    """NVIDIA ModelOpt: `NVFP4QTensor`."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    packed = stored[".weight"]
    shape = torch.Size((packed.shape[0], packed.shape[1] * 2))
    return NVFP4QTensor(shape, torch.float32, packed).dequantize(
        torch.float32,
        scale=stored[".weight_scale"],
        double_scale=stored[".weight_scale_2"],
        block_sizes={-1: 16},
    )


def compress(kind: str, is_wide: bool = True, **arguments: Any) -> Format:
    """compressed-tensors: a compressor, with scales by its own `calculate_qparams`."""

    def scheme() -> Any:
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))

    def compressor() -> Any:
        from compressed_tensors.compressors import BaseCompressor

        return BaseCompressor.get_value_from_registry(kind)

    def make() -> tuple[Tensors, dict[str, Any]]:
        from compressed_tensors.quantization.utils import calculate_qparams

        given = scheme().weights
        weight = make_weight().to(torch.float32 if is_wide else torch.bfloat16)
        groups, whole = weight, None
        if given.group_size:
            groups = weight.view(OUT, -1, given.group_size)
        low, high = groups.amin(-1), groups.amax(-1)
        if given.strategy == "channel":
            low, high = low[:, None], high[:, None]
        if given.strategy == "tensor":
            low, high = weight.min(), weight.max()
        if given.strategy == "block":
            rows, columns = given.block_structure
            blocks = weight.view(OUT // rows, rows, IN // columns, columns)
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        state: Tensors = {"weight": weight}
        if kind == "nvfp4-pack-quantized":
            whole = torch.tensor([448 * 6 / weight.abs().max().item()])
            state["weight_global_scale"] = whole
        scale, zero = calculate_qparams(low, high, given, global_scale=whole)
        if given.strategy == "tensor":
            scale, zero = scale.reshape(1), zero.reshape(1)
        state |= {"weight_scale": scale, "weight_zero_point": zero}
        made = compressor().compress(state, scheme())
        weights = given.model_dump(mode="json")
        config = {
            "quant_method": "compressed-tensors",
            "format": kind,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }
        return {f".{name}": value for name, value in made.items()}, config

    def values(stored: Tensors) -> torch.Tensor:
        state = {name.removeprefix("."): value for name, value in stored.items()}
        if "weight_shape" in state:
            # Of the whole weight, whichever part this is.
            packed = state["weight_packed"]
            columns = packed.shape[1] * 32 // scheme().weights.num_bits
            state["weight_shape"] = torch.tensor([packed.shape[0], columns])
        return compressor().decompress(state, scheme())["weight"]

    return Format(make, values)


def pack(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Numbers of four bits in int32, along the second dimension."""
    words = values.view(len(values), -1, 8)[:, :, list(order)]
    return (words << torch.arange(0, 32, 4)).sum(-1).to(torch.uint32).view(torch.int32)


def unpack(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """The inverse of `pack`."""
    numbers = words[:, :, None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15
    back = [order.index(place) for place in range(8)]
    return numbers[:, :, back].reshape(len(words), -1)


def make_awq() -> tuple[Tensors, dict[str, Any]]:
    """Packed in the order that AutoAWQ publishes."""
    torch.manual_seed(13)
    stored = {
        ".qweight": pack(torch.randint(0, 16, (IN, OUT)), AWQ_ORDER),
        ".qzeros": pack(torch.randint(0, 16, (IN // 32, OUT)), AWQ_ORDER),
        ".scales": (torch.rand(IN // 32, OUT) * 0.1).half(),
    }
    return stored, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


def dequantize_awq(stored: Tensors) -> torch.Tensor:
    """AutoAWQ's formula."""
    numbers, zeros = (unpack(stored[name], AWQ_ORDER) for name in (".qweight", ".qzeros"))
    wide = [one.repeat_interleave(32, 0) for one in (zeros, stored[".scales"])]
    return ((numbers - wide[0]) * wide[1]).T.contiguous()


def make_gptq() -> tuple[Tensors, dict[str, Any]]:
    """Packed along the input, zero points stored less one, as GPTQ's first format has them."""
    torch.manual_seed(13)
    numbers = torch.randint(0, 16, (IN, OUT))
    stored = {
        ".qweight": pack(numbers.T.contiguous()).T.contiguous(),
        ".qzeros": pack(torch.randint(1, 16, (IN // 32, OUT)) - 1),
        ".scales": (torch.rand(IN // 32, OUT) * 0.1).half(),
        ".g_idx": (torch.arange(IN) // 32).to(torch.int32),
    }
    return stored, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}


def dequantize_gptq(stored: Tensors) -> torch.Tensor:
    """GPTQ's formula, with groups counted from the first that is there."""
    numbers = unpack(stored[".qweight"].T.contiguous()).T
    groups = (stored[".g_idx"] - stored[".g_idx"][:1]).long()
    zeros, scales = unpack(stored[".qzeros"]) + 1, stored[".scales"]
    return ((numbers - zeros[groups]) * scales[groups]).T.contiguous()


def make_bitsandbytes(kind: str, *, is_nested: bool) -> tuple[Tensors, dict[str, Any]]:
    """bitsandbytes: `quantize_4bit` on the CPU."""
    from bitsandbytes.functional import quantize_4bit

    weight = make_weight(64, 1024).to(torch.bfloat16)
    packed, state = quantize_4bit(weight, quant_type=kind, compress_statistics=is_nested)
    stored = {".weight": packed}
    stored |= {f".weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return stored, config


def dequantize_bitsandbytes(stored: Tensors) -> torch.Tensor:
    """bitsandbytes: `dequantize_4bit`, with the shape that there are elements for."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = {name.removeprefix(".weight."): v for name, v in stored.items() if name != ".weight"}
    found = QuantState.from_dict(state, device=torch.device("cpu"))
    found.shape = torch.Size((stored[".weight"].numel() * 2 // found.shape[1], found.shape[1]))
    return dequantize_4bit(stored[".weight"], found)


def bitsandbytes(kind: str, *, is_nested: bool = False) -> Format:
    """4-bit weights of a kind, with nested statistics or without."""
    return Format(lambda: make_bitsandbytes(kind, is_nested=is_nested), dequantize_bitsandbytes)


FORMATS: dict[str, Format] = {
    "block-fp8": Format(make_block_fp8, dequantize_block_fp8),
    "mxfp4": Format(make_mxfp4, dequantize_mxfp4),
    "nvfp4-modelopt": Format(make_nvfp4, dequantize_nvfp4),
    "nvfp4-compressed-tensors": compress(
        "nvfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    ),
    "mxfp4-compressed-tensors": compress(
        "mxfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype=torch.uint8,
        zp_dtype=torch.uint8,
    ),
    "int4-groups": compress(
        "pack-quantized", is_wide=False, num_bits=4, strategy="group", group_size=32
    ),
    "int4-zero-points": compress(
        "pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "int8-packed-channels": compress("pack-quantized", num_bits=8, strategy="channel"),
    "fp8-channels": compress("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8-tensor": compress("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "int8-channels": compress("int-quantized", num_bits=8, strategy="channel"),
    "int8-zero-points": compress("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    "fp8-blocks": compress(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[24, 32]
    ),
    "awq": Format(make_awq, dequantize_awq),
    "gptq": Format(make_gptq, dequantize_gptq),
    "bitsandbytes-nf4": bitsandbytes("nf4"),
    "bitsandbytes-nf4-nested": bitsandbytes("nf4", is_nested=True),
    "bitsandbytes-fp4": bitsandbytes("fp4"),
}
