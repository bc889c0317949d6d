"""GPTQ and AWQ matrices in safetensors: integers packed into int32 words, with a scale and a zero for each group.

Knows both layouts and gives exact values back; what they are multiplied in is decided elsewhere. A matrix W
[out, in] is w[o, i] = scales[g, o] · (q[i, o] − zeros[g, o]), g the group of input i. Sources: GPTQ, arXiv
2210.17323, as AutoGPTQ and GPTQModel save it (words hold neighbouring inputs; version 1 stores zeros less one;
`g_idx` names the group of each input); AWQ, arXiv 2306.00978, version GEMM of AutoAWQ (words hold outputs in the
order 0 2 4 6 1 3 5 7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from perilune.errors import UnsupportedModel

PACKED = "qweight"
_WORD_BITS = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_DAMAGED = "The file is inconsistent; download it again."

Read = Callable[[str], torch.Tensor | None]
"""A tensor of one module by its last name (`qweight`, `qzeros`, `scales`, `g_idx`), None when there is none."""


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """How a folder's packed matrices lie. `zero_offset` is added to stored zeros; `group_inputs` 0 is all."""

    method: Literal["gptq", "awq"]
    bits: int
    group_inputs: int
    zero_offset: int

    def dequantise(self, name: str, read: Read) -> torch.Tensor:
        """fp32 [out, in]. Raises `UnsupportedModel` when the parts are missing or don't fit together."""
        words, packed_zeros, scales = (read(part) for part in (PACKED, "qzeros", "scales"))
        if words is None or packed_zeros is None or scales is None:
            raise UnsupportedModel(f"{name} lacks its zeros or scales.", hint=_DAMAGED)
        if (
            words.dim() != 2
            or packed_zeros.dim() != 2
            or words.dtype != torch.int32
            or packed_zeros.dtype != torch.int32
        ):
            raise UnsupportedModel(f"{name} is not packed as {self.method} packs.", hint=_DAMAGED)
        if self.method == "gptq":
            quants, zeros = self._unpack(words.T).T, self._unpack(packed_zeros)
        else:
            quants, zeros = self._unpack_awq(words), self._unpack_awq(packed_zeros)
        groups = self._groups(quants.shape[0], read("g_idx"))
        agree = scales.shape == zeros.shape and scales.shape[1] == quants.shape[1] and len(groups) == len(quants)
        if not agree or int(groups.min()) < 0 or int(groups.max()) >= len(scales):
            raise UnsupportedModel(f"The parts of {name} have sizes that don't fit together.", hint=_DAMAGED)
        centred = quants - (zeros + self.zero_offset)[groups]
        return (centred * scales.float()[groups]).T.contiguous()

    def _unpack(self, words: torch.Tensor) -> torch.Tensor:
        """int32 [rows, words] -> fp32 [rows, words * numbers in a word], lowest bits first."""
        shifts = torch.arange(0, _WORD_BITS, self.bits, dtype=torch.int32)
        numbers: torch.Tensor = (words[..., None] >> shifts) & (2**self.bits - 1)
        return numbers.flatten(1).float()

    def _unpack_awq(self, words: torch.Tensor) -> torch.Tensor:
        numbers = self._unpack(words).view(len(words), -1, len(_AWQ_ORDER))
        # Place p of a word holds output _AWQ_ORDER[p]; the inverse says where each output lies.
        places = torch.tensor(_AWQ_ORDER).argsort()
        return numbers[..., places].flatten(1)

    def _groups(self, inputs: int, named: torch.Tensor | None) -> torch.Tensor:
        if named is not None:
            return named.reshape(-1).long()
        return torch.arange(inputs) // (self.group_inputs or inputs)


def integer_format(config: Mapping[str, Any]) -> IntegerFormat:
    """Read config.json's `quantization_config`. Raises `UnsupportedModel` for other methods and layouts."""
    method = str(config.get("quant_method", "unknown"))
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size", -1))
    layout = str(config.get("checkpoint_format" if method == "gptq" else "version") or "").lower()
    layouts = {"gptq": ("", "gptq", "gptq_v2"), "awq": ("", "gemm")}
    widths = {"gptq": (4, 8), "awq": (4,)}
    if method not in layouts or layout not in layouts[method] or bits not in widths[method] or group == 0:
        detail = "" if method not in layouts else f" with bits={bits!r}, group_size={group!r}, layout {layout!r}"
        raise UnsupportedModel(
            f"Weights quantised by {method!r}{detail} are not supported in safetensors.",
            hint="Supported: GPTQ with 4 or 8 bits, AWQ (GEMM) with 4. Or pick the unquantised or a GGUF version.",
        )
    if not isinstance(group, int):
        raise UnsupportedModel(f"The {method} group_size {group!r} is not a number.", hint=_DAMAGED)
    offset = 1 if method == "gptq" and layout != "gptq_v2" else 0
    return IntegerFormat("gptq" if method == "gptq" else "awq", int(bits), max(0, group), offset)
