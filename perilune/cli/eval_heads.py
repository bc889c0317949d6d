"""`perilune eval heads`: which of a model's KV heads look things up far back, and a profile that decode uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.cli.console import StatusLine, print_json, say, table
from perilune.config import Settings
from perilune.errors import ConfigError

if TYPE_CHECKING:
    from perilune.runtime.head_profile import HeadProfile

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Options:
    """`output` None: beside the model, where `serve` finds it."""

    haystacks: int
    segments: int
    threads: int
    output: Path | None
    as_json: bool


def run(settings: Settings, texts: Sequence[Path], options: Options) -> None:
    """Measure, keep and print.

    Raises `UnsupportedModel`, `Overloaded`, `InvalidRequest` for text or sizes that can't be used, `ConfigError`
    where the profile can't be written.
    """
    import torch

    from perilune.runtime.evaluate.heads_eval import HeadsPlan, measure_heads
    from perilune.runtime.evaluate.heads_text import calibration_text
    from perilune.runtime.evaluate.text import read_text
    from perilune.runtime.head_profile import profile_path, write_profile
    from perilune.runtime.hub.pull import resolve

    if options.threads:
        torch.set_num_threads(options.threads)
    text = read_text(texts) if texts else calibration_text()
    files = resolve(settings.model.path, settings.home)
    status = StatusLine(quiet=options.as_json)
    plan = HeadsPlan(haystacks=options.haystacks, segments=options.segments)
    found = measure_heads(files.path, text.text, plan, lambda stage: status.update("measuring heads", stage))
    status.clear()
    kept = options.output or profile_path(files.path)
    try:
        write_profile(found, kept)
    except OSError as error:
        raise ConfigError(f"{kept} can't be written: {error.strerror}.", hint="Name another --output.") from None
    if options.as_json:
        print_json(asdict(found))
    else:
        _show(found, kept)


def _show(found: HeadProfile, kept: Path) -> None:
    ranked = sorted(
        ((share, layer, head) for layer, row in enumerate(found.shares) for head, share in enumerate(row)),
        reverse=True,
    )
    rows = [
        (str(layer), str(head), f"{share:.2f}", "sketches" if found.sketched[layer][head] else "means")
        for share, layer, head in ranked[:_SHOWN]
    ]
    table(("LAYER", "KV HEAD", "SHARE", "RANKED BY"), rows)
    sketched, nothing = sum(map(sum, found.sketched)), sum(not share for share, *_ in ranked)
    say(f"{len(ranked)} KV heads: {sketched} rank units by sketches, {nothing} read nothing far.")
    say(f"Kept in {kept}.")
