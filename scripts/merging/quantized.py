# SPDX-License-Identifier: Apache-2.0
"""The values that a base quantized by bitsandbytes computes with, one tensor at a time.

A run on a quantized base trained its adapters against these values, and not against those of the
files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes import functional
from transformers import BitsAndBytesConfig

INT8_LEVELS = 127  # an int8 weight times its row's scale over this is the value


@dataclass(frozen=True)
class Quantization:
    """How a run quantized its base when it loaded it.

    Attributes:
        bits: 4 or 8.
        number_format: "nf4" or "fp4", for 4 bits.
        dtype: of the weights that are quantized, and of the products.
    """

    bits: int
    number_format: str
    double_quant: bool
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Return the name as --base has it."""
        return f"{self.bits}bit"

    @classmethod
    def of_run(cls, arguments: Mapping[str, Any]) -> "Quantization | None":
        """Return the quantization that the arguments of a run name, or None.

        Raises ValueError for values that the recipes do not write.
        """
        number_format = str(arguments.get("bnb_4bit_quant_type", "nf4"))
        double_quant = bool(arguments.get("bnb_4bit_use_double_quant", False))
        dtype = dtype_of_run(arguments) or torch.bfloat16
        if arguments.get("load_in_4bit"):
            if number_format not in ("nf4", "fp4"):
                raise ValueError(f"bnb_4bit_quant_type {number_format} is neither nf4 nor fp4")
            return cls(4, number_format, double_quant, dtype)
        if arguments.get("load_in_8bit"):
            return cls(8, "int8", False, dtype)
        return None

    def config(self) -> BitsAndBytesConfig:
        """Return the configuration with which the base is loaded as in training."""
        if self.bits == 8:
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.number_format,
            bnb_4bit_quant_storage=self.dtype,
            bnb_4bit_compute_dtype=self.dtype,
            bnb_4bit_use_double_quant=self.double_quant,
        )

    def round_trip(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight, [out, in], as the quantized base computes with it."""
        if self.bits == 8:
            return int8_round_trip(weight)
        packed, state = functional.quantize_4bit(
            weight.to(self.dtype).contiguous(),
            compress_statistics=self.double_quant,
            quant_type=self.number_format,
            quant_storage=self.dtype,
        )
        return functional.dequantize_4bit(packed, state)


def dtype_of_run(arguments: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype in which a run loaded its base, or None for that of the files.

    Raises ValueError if it is not the name of a floating-point dtype.
    """
    name = arguments.get("dtype", "auto")
    if name == "auto":
        return None
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype {name} is not that of a model")
    return dtype


def int8_round_trip(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight after LLM.int8's quantization, which bitsandbytes computes in fp16."""
    rows, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16).contiguous())
    return rows.float() * (scales.float().view(-1, 1) / INT8_LEVELS)
