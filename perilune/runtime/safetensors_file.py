"""Hugging Face model folders: config.json and one or several safetensors files.

Knows the folder's layout and dtypes, not what the tensors mean. Never unpickles anything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from perilune.errors import UnsupportedModel
from perilune.runtime.stored import FLOAT_KINDS, StoredTensor

INDEX_FILE = "model.safetensors.index.json"
KIND_OF_DTYPE = {dtype: kind for kind, (dtype, _) in FLOAT_KINDS.items()}
MAX_JSON_BYTES = 64 * 1024**2


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `UnsupportedModel` when it is unreadable or something else."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError("it is larger than 64 MiB")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path.name} can't be read: {error}.", hint="Download the folder again.") from None
    if not isinstance(data, dict):
        raise UnsupportedModel(f"{path.name} is not a JSON object.", hint="Download the folder again.")
    return data


def is_model_folder(path: Path) -> bool:
    """Whether a folder looks like a Hugging Face model."""
    return path.is_dir() and (path / "config.json").is_file()


class SafetensorsFolder:
    """An opened folder. Raises `UnsupportedModel` when weights are missing, cut short or of an unknown dtype."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        self._handles: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        for name in self._weight_files():
            for key in self._open(name).keys():  # noqa: SIM118 - not a dict
                self._file_of[key] = name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self.path / name for name in sorted(self._handles))

    def value(self, name: str) -> torch.Tensor | None:
        """A tensor of any type, None when there is none."""
        file = self._file_of.get(name)
        return None if file is None else cast(torch.Tensor, self._handles[file].get_tensor(name))

    def tensor(self, name: str) -> StoredTensor:
        value = self.value(name)
        if value is None:
            raise UnsupportedModel(f"The model lacks the tensor {name}.", hint="Download the folder again.")
        kind = KIND_OF_DTYPE.get(value.dtype)
        if kind is None:
            raise UnsupportedModel(
                f"Tensor {name} is stored as {str(value.dtype).removeprefix('torch.')}, which is not supported.",
                hint=f"Supported in safetensors: {', '.join(FLOAT_KINDS)}. Pick an unquantised or a GGUF version.",
            )
        cols = value.shape[-1] if value.dim() else 1
        raw = value.contiguous().reshape(-1, cols).view(torch.uint8).numpy()
        return StoredTensor(name, kind, raw.shape[0], cols, cast("np.ndarray[Any, np.dtype[np.uint8]]", raw))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without reading data. `name` must exist."""
        return tuple(self._handles[self._file_of[name]].get_slice(name).get_shape())

    def close(self) -> None:
        self._handles.clear()

    def _weight_files(self) -> list[str]:
        index = self.path / INDEX_FILE
        if index.is_file():
            listed = read_json(index).get("weight_map")
            if not isinstance(listed, dict):
                raise UnsupportedModel(f"{INDEX_FILE} has no weight_map.", hint="Download the folder again.")
            names = sorted({str(name) for name in listed.values()})
            if any("/" in name or name.startswith(".") for name in names):
                raise UnsupportedModel(f"{INDEX_FILE} points outside its folder.", hint="Don't use this model.")
        else:
            names = sorted(file.name for file in self.path.glob("*.safetensors"))
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing or not names:
            raise UnsupportedModel(
                f"The folder {self.path.name} has no {missing[0] if missing else 'safetensors file'}.",
                hint="Supported: safetensors folders and GGUF files. Download it again, or convert .bin weights.",
            )
        return names

    def _open(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            self._handles[name] = safe_open(str(self.path / name), framework="pt")
        except (SafetensorError, OSError) as error:
            raise UnsupportedModel(
                f"{name} can't be loaded: {error}.", hint="The file is cut short or damaged; download it again."
            ) from None
        return self._handles[name]
