"""The decode layouts of `PackedLinear`, in PyTorch: interleaving, and reading back.

Knows GGUF's block-32 formats and the tiles that `interface.PackedLinear` draws. Set-up work and the oracle
of the native pack and dequantise functions; never on the hot path when native code runs.
"""

from __future__ import annotations

import torch

from perilune.kernels.interface import BLOCK_TOKENS, ROW_TILE, GgufKind, PackedKind, PackedLinear

GGUF_BLOCK_BYTES: dict[GgufKind, int] = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q8_0": 34}
TILE_BLOCK_BYTES: dict[PackedKind, int] = {"q4": 320, "int8": 544}
_COLUMNS = BLOCK_TOKENS


def check_gguf(raw: torch.Tensor, rows: int, cols: int, kind: GgufKind) -> torch.Tensor:
    """raw as uint8 [rows, cols / 32, block bytes]. Raises ValueError if it isn't that many blocks."""
    if kind not in GGUF_BLOCK_BYTES:
        raise ValueError(f"unknown GGUF kind {kind}")
    if cols % _COLUMNS:
        raise ValueError(f"{kind} needs a multiple of {_COLUMNS} columns, not {cols}")
    expected = rows * (cols // _COLUMNS) * GGUF_BLOCK_BYTES[kind]
    if raw.dtype != torch.uint8 or raw.numel() != expected:
        raise ValueError(f"{kind} [{rows}, {cols}] is {expected} bytes of uint8, not {raw.numel()} of {raw.dtype}")
    return raw.contiguous().view(rows, cols // _COLUMNS, GGUF_BLOCK_BYTES[kind])


def pack_gguf(raw: torch.Tensor, rows: int, cols: int, kind: GgufKind) -> PackedLinear:
    """See `Kernels.pack_gguf`."""
    blocks = check_gguf(raw, rows, cols, kind)
    d = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    if kind == "Q8_0":
        return _tile_int8(blocks[..., 2:].contiguous().view(torch.int8), d, rows, cols)
    if kind == "Q5_0":
        return _tile_int8(_q5_values(blocks), d, rows, cols)
    minima = -8 * d if kind == "Q4_0" else blocks[..., 2:4].contiguous().view(torch.float16)[..., 0]
    nibbles = blocks[..., -16:]
    quants = torch.cat([nibbles & 15, nibbles >> 4], -1)
    return _tile_q4(quants, d, minima, rows, cols)


def _q5_values(blocks: torch.Tensor) -> torch.Tensor:
    """Q5_0's quants, int8 [rows, cols / 32, 32] in -16 … 15. Their fifth bits are a little-endian uint32."""
    nibbles = blocks[..., 6:]
    low = torch.cat([nibbles & 15, nibbles >> 4], -1)
    shifts = torch.arange(8, dtype=torch.uint8)
    high = (blocks[..., 2:6, None] >> shifts) & 1
    return (low | (high.flatten(-2) << 4)).to(torch.int8) - 16


def pack_int8(weight: torch.Tensor) -> PackedLinear:
    """See `Kernels.pack_int8`."""
    rows, cols = check_matrix(weight, _COLUMNS)
    blocks = weight.float().view(rows, cols // _COLUMNS, _COLUMNS)
    d = (blocks.abs().amax(-1) / 127).to(torch.float16)
    scale = d.float()
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    quants = (blocks * inverse[..., None]).round().clamp(-127, 127).to(torch.int8)
    return _tile_int8(quants, d, rows, cols)


def pack_bf16(weight: torch.Tensor) -> PackedLinear:
    """See `Kernels.pack_bf16`."""
    rows, cols = check_matrix(weight, 2)
    padded = _pad_rows(weight.to(torch.bfloat16))
    tiles = padded.view(-1, ROW_TILE, cols // 2, 2).transpose(1, 2)
    return PackedLinear("bf16", rows, cols, tiles.contiguous().view(torch.uint8).flatten())


def unpack(packed: PackedLinear) -> torch.Tensor:
    """The exact weight, fp32 [rows, cols]."""
    tiles = packed.padded_rows // ROW_TILE
    if packed.kind == "bf16":
        pairs = packed.data.view(torch.bfloat16).view(tiles, packed.cols // 2, ROW_TILE, 2)
        return pairs.transpose(1, 2).reshape(-1, packed.cols)[: packed.rows].float()
    blocks = packed.data.view(tiles, packed.cols // _COLUMNS, TILE_BLOCK_BYTES[packed.kind])
    d = _fp16_at(blocks, 0)
    if packed.kind == "int8":
        bytes_ = blocks[..., 32:].view(tiles, -1, 8, ROW_TILE, 4).permute(0, 3, 1, 2, 4)
        weight = d * (bytes_.reshape(tiles, ROW_TILE, -1, _COLUMNS).float() - 128)
    else:
        bytes_ = blocks[..., 64:].view(tiles, -1, 4, ROW_TILE, 4).permute(0, 3, 1, 2, 4)
        quants = torch.stack([bytes_ & 15, bytes_ >> 4], -2).reshape(tiles, ROW_TILE, -1, _COLUMNS)
        weight = d * quants.float() + _fp16_at(blocks, 32)
    return weight.reshape(-1, packed.cols)[: packed.rows]


def _fp16_at(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """fp32 [tiles, 16, blocks, 1]: the 16 fp16 numbers at a byte offset of every tile's block."""
    numbers = blocks[..., offset : offset + 32].contiguous().view(torch.float16)
    return numbers.float().transpose(1, 2)[..., None]


def check_matrix(weight: torch.Tensor, multiple: int) -> tuple[int, int]:
    """Rows and columns. Raises ValueError unless it is a matrix with a multiple of `multiple` columns."""
    if weight.dim() != 2 or weight.shape[1] % multiple:
        raise ValueError(f"need [rows, a multiple of {multiple} columns], not {list(weight.shape)}")
    return weight.shape[0], weight.shape[1]


def _pad_rows(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[0] % ROW_TILE
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _by_tile(numbers: torch.Tensor) -> torch.Tensor:
    """fp16 [rows, blocks] -> uint8 [tiles, blocks, 32]."""
    padded = _pad_rows(numbers)
    return padded.view(-1, ROW_TILE, padded.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def _tile_int8(quants: torch.Tensor, d: torch.Tensor, rows: int, cols: int) -> PackedLinear:
    """quants int8 [rows, blocks, 32], d fp16 [rows, blocks]."""
    shifted = _pad_rows((quants.to(torch.int16) + 128).to(torch.uint8))
    tiles = shifted.view(-1, ROW_TILE, cols // _COLUMNS, 8, 4).permute(0, 2, 3, 1, 4)
    body = tiles.reshape(-1, cols // _COLUMNS, 512)
    return PackedLinear("int8", rows, cols, torch.cat([_by_tile(d), body], -1).flatten())


def _tile_q4(quants: torch.Tensor, d: torch.Tensor, minima: torch.Tensor, rows: int, cols: int) -> PackedLinear:
    """quants uint8 0 … 15 [rows, blocks, 32], d and minima fp16 [rows, blocks]."""
    halves = _pad_rows(quants).view(-1, ROW_TILE, cols // _COLUMNS, 4, 2, 4)
    nibbles = halves[..., 0, :] | (halves[..., 1, :] << 4)
    body = nibbles.permute(0, 2, 3, 1, 4).reshape(-1, cols // _COLUMNS, 256)
    return PackedLinear("q4", rows, cols, torch.cat([_by_tile(d), _by_tile(minima), body], -1).flatten())
