"""The bound of `Capabilities.max_branches`: so many shared blocks at one place, the one shared longest ago goes."""

from __future__ import annotations

import pytest

from perilune.engine.block_pool import BlockPool
from perilune.engine.policy import EngineLimits
from perilune.engine.prefix_cache import PrefixCache
from perilune.errors import ConfigError
from perilune.runtime.mri import Capabilities
from tests.engine.harness import Bench
from tests.fakes import FakeRuntime


def test_a_full_place_gives_up_what_was_shared_longest_ago() -> None:
    cache = PrefixCache(branches=2)
    pool = BlockPool(6, cache.discard)
    first, second, third, deeper, held = pool.allocate(5) or []
    for name, block, place in ((b"a", first, 0), (b"b", second, 0), (b"d", deeper, 1)):
        assert cache.add(name, block, pool, place)
    assert not cache.add(b"c", third, pool, 0), "both are in use"
    pool.release([first, second])
    assert cache.add(b"c", third, pool, 0)
    assert [cache.get(name) for name in (b"a", b"b", b"c", b"d")] == [None, second, third, deeper]
    assert (pool.free, pool.cached) == (2, 1), "the one that was given up is free again"
    cache.check_integrity(pool)
    pool.release([third, deeper, held])
    pool.check_integrity()


def test_a_runtime_bounds_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRuntime, "capabilities", Capabilities(max_branches=8))
    assert Bench(batch=4).limits == EngineLimits(batch=4)
    with pytest.raises(ConfigError, match="8 sequences"):
        Bench(batch=8)
