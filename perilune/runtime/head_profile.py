"""How a model's KV heads share the budget of decode over closed segments: measured once, kept beside the model.

Few heads look things up far back; most read their neighbourhood. `perilune eval heads` measures which
(`evaluate.heads`) and writes a profile; models of the catalogue may come with one (`profiles`). Without a profile
all heads are alike. Knows files and names; nothing of attention or text.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from perilune.errors import ConfigError
from perilune.kernels.interface import HeadBudgets

MAX_SHARE = 1000.0
_SHIPPED = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True)
class HeadProfile:
    """One model's. `content` names its files (`loader.content_name`). By layer and KV head: `shares`, factors of
    the attention policy's units, of mean 1 where they were measured, 0: nothing far is read; `sketched`: whether
    units are ranked by sketches of their keys or by their mean keys alone, which is several times as fast."""

    content: str
    shares: tuple[tuple[float, ...], ...]
    sketched: tuple[tuple[bool, ...], ...]

    def budgets(self) -> HeadBudgets:
        return HeadBudgets(torch.tensor(self.shares), torch.tensor(self.sketched, dtype=torch.uint8))


def profile_path(model: Path) -> Path:
    """Where a model's own profile lies: beside its file or folder."""
    return model.with_name(f"{model.name}.heads.json")


def find_profile(model: Path, content: str, layers: int, kv_heads: int) -> HeadProfile | None:
    """A model's own profile, else the shipped one of the same files, else None.

    Raises `ConfigError` for a file that can't be read or is of other files than the model's.
    """
    own = profile_path(model)
    if own.exists():
        found = read_profile(own, layers, kv_heads)
        if found.content != content:
            raise ConfigError(
                f"{own.name} was measured on other files than the model's.",
                hint="Measure again with `perilune eval heads`, or delete it.",
            )
        return found
    shipped = _SHIPPED / f"{content[:16]}.json"
    return read_profile(shipped, layers, kv_heads) if shipped.exists() else None


def read_profile(path: Path, layers: int, kv_heads: int) -> HeadProfile:
    """Raises `ConfigError` for anything but a profile of a model with these heads."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        profile = HeadProfile(
            str(told["content"]),
            tuple(tuple(float(share) for share in row) for row in told["shares"]),
            tuple(tuple(bool(flag) for flag in row) for row in told["sketched"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path.name} is no profile of heads: {error}.", hint="Measure again with `perilune eval heads`."
        ) from None
    for rows in (profile.shares, profile.sketched):
        if [len(row) for row in rows] != [kv_heads] * layers:
            raise ConfigError(
                f"{path.name} isn't of a model with {layers} layers of {kv_heads} KV heads.",
                hint="Measure again with `perilune eval heads`.",
            )
    if not all(math.isfinite(share) and 0 <= share <= MAX_SHARE for row in profile.shares for share in row):
        raise ConfigError(f"A share in {path.name} isn't between 0 and {MAX_SHARE:g}.", hint="Measure again.")
    return profile


def write_profile(profile: HeadProfile, path: Path) -> None:
    """Raises OSError where the folder can't be written."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(asdict(profile)) + "\n", encoding="utf-8")
    partial.replace(path)
