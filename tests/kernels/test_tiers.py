"""Closed segments in the reference: the codec's errors, the arrangement, and what hybrid attention must equal."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.kernels import tier_attention
from perilune.kernels.interface import HeadShape, KVLayout, KVPool, RaggedBatch, SegmentBatch, SegmentPool
from perilune.kernels.memory import zeroed_bytes
from perilune.kernels.reference import ReferenceKernels, gather_kv
from perilune.kernels.tier_attention import Far, Near, Scores
from perilune.kernels.tier_reference import Records, arrange, close, read_records, rotate, write_records
from perilune.kernels.tiers import SEGMENT_TOKENS, SINK_TOKENS, AttentionPolicy, SegmentLayout
from perilune.runtime.kv.spec import TIER_FORMAT_VERSION
from tests.kernels.cases import head_shape

RELAXED = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DIMS = [16, 64, 80, 128, 256]
OPEN = AttentionPolicy(dense_tokens=0, dense_layers=0, window_tokens=0)


def lumpy(records: int, tokens: int, dim: int, seed: int = 0) -> torch.Tensor:
    """bf16 [R, n, D] like real keys: themes, a large shared offset, two channels far wider than the rest."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    themes = normal(records, 9, dim)
    theme = torch.randint(0, 9, (records, tokens), generator=generator)
    keys = themes.gather(1, theme[..., None].expand(-1, -1, dim)) + 0.3 * normal(records, tokens, dim)
    keys[..., :2] *= 8
    return (keys + 3 * normal(records, 1, dim)).to(torch.bfloat16)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


# ------------------------------------------------------------------------------------------ one record


@RELAXED
@given(dim=st.sampled_from(DIMS), seed=st.integers(0, 99), tokens=st.sampled_from([160, 336, 512]))
def test_codec_errors_are_at_most_half_a_step(dim: int, seed: int, tokens: int) -> None:
    k, v = lumpy(2, tokens, dim, seed), lumpy(2, tokens, dim, seed + 100)
    order = arrange(k.float())
    records = close(k, v)
    index = order[..., None].expand(-1, -1, dim)
    keys, values = k.float().gather(1, index), v.float().gather(1, index)
    steps = records.k_scale.float().repeat_interleave(32, 1)[:, : keys.shape[1]]
    # Besides rounding to a step: scale and zero are f16, 255 steps up to 2^-11 short, and k_zero 2^-11 of itself.
    spare = 255 * steps * 2**-11 + keys.abs().amax() * 2**-11
    assert ((records.keys().flatten(1, 2) - keys).abs() <= 0.5 * steps + spare).all()
    error = (records.rotated_values().flatten(1, 2) - rotate(values)).abs()
    assert (error <= records.v_scale.float().flatten(1)[..., None] * (0.5 + 127 * 2**-11)).all()
    assert relative(records.keys().flatten(1, 2), keys) < 0.005
    assert relative(records.rotated_values().flatten(1, 2), rotate(values)) < 0.01


@RELAXED
@given(dim=st.sampled_from(DIMS), seed=st.integers(0, 99))
def test_means_err_by_at_most_half_a_step(dim: int, seed: int) -> None:
    k, v = lumpy(1, 528, dim, seed), lumpy(1, 528, dim, seed + 1)
    order = arrange(k.float())[0]
    records = close(k, v)
    exact = rotate(k[0].float()[order]).view(-1, 16, dim).mean(1)
    scale = records.mean_scale.float()[0][:, None]
    assert ((records.mean_keys()[0] - exact).abs() <= (0.501 + 7.5 * 2**-11) * scale).all()
    quads = torch.stack([part.mean(0) for part in torch.split(rotate(v[0].float()[order]), 64)])
    scale = records.quad_v_scale.float()[0][:, None]
    error = records.unit_values()[0, ::4] - quads
    assert (error.abs() <= (0.501 + 127 * 2**-11) * scale).all()


@RELAXED
@given(dim=st.sampled_from(DIMS), seed=st.integers(0, 99))
def test_a_sketch_is_nearer_to_its_key_than_the_mean_is(dim: int, seed: int) -> None:
    """By sign and mean size, a difference with normal channels keeps 1 - 2 / pi of its square."""
    k = lumpy(1, 528, dim, seed)
    records = close(k, k)
    keys = rotate(k[0].float()[arrange(k.float())[0]]).view(-1, 16, dim)
    by_mean = (records.mean_keys()[0][:, None] - keys).square().sum()
    by_sketch = (records.mean_keys()[0][:, None] + records.sketched_rests()[0] - keys).square().sum()
    assert by_sketch < 0.5 * by_mean


@pytest.mark.parametrize("tokens", [SEGMENT_TOKENS, SEGMENT_TOKENS - SINK_TOKENS])
def test_every_token_is_kept_once(tokens: int) -> None:
    k = lumpy(2, tokens, 64)
    order = arrange(k.float())
    assert torch.equal(order.sort(1).values, torch.arange(tokens).expand(2, -1))
    assert close(k, k).k.shape == (2, tokens // 16, 16, 64)


def test_units_hold_keys_that_are_alike() -> None:
    """Clusters are the point: a unit's keys lie far closer to their mean than 16 neighbours of the prompt do."""
    k = lumpy(1, 1024, 64)
    units = close(k, k).keys()
    spread = (units - units.mean(2, keepdim=True)).norm()
    neighbours = k.float().view(1, 64, 16, 64)
    assert spread < 0.5 * (neighbours - neighbours.mean(2, keepdim=True)).norm()


def test_a_lone_key_is_found_where_means_hide_it() -> None:
    """One key in 1,024 is what the query asks for; the means show only a theme that the query likes a little."""
    generator = torch.Generator().manual_seed(3)
    axes = torch.linalg.qr(torch.randn(64, 9, generator=generator)).Q.T  # eight themes, and the lone direction
    k = 4 * axes[torch.arange(1024) % 8] + 0.2 * torch.randn(1024, 64, generator=generator)
    k[137] += 10 * axes[8]
    query = 2 * axes[8] + 1.25 * axes[0]
    records = close(k[None], k[None])
    unit = int((arrange(k[None])[0] == 137).nonzero()) // 16
    of_mean = records.mean_keys()[0] @ rotate(query)
    scores = of_mean + (records.sketched_rests()[0] @ rotate(query)).logsumexp(-1)
    by_mean = of_mean.argsort(descending=True).tolist()
    assert (k @ query).argmax() == 137
    assert scores.argmax() == unit
    assert by_mean.index(unit) >= 8  # the theme's units


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_its_own_inverse(dim: int) -> None:
    x = torch.randn(5, 3, dim)
    torch.testing.assert_close(rotate(rotate(x)), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotate(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=1e-5)


def test_constant_keys_and_zeros_have_no_error() -> None:
    k = torch.full((1, 160, 64), 3.25, dtype=torch.bfloat16)
    records = close(k, torch.zeros_like(k))
    assert torch.equal(records.keys(), torch.full_like(records.keys(), 3.25))
    assert not records.rotated_values().any()


def test_border_tokens_err_no_more_than_interior_ones() -> None:
    """A segment's first and last 32 tokens of the prompt, over 24 records (R4: no artefact at borders)."""
    k, v = lumpy(24, 1024, 64, 5), lumpy(24, 1024, 64, 6)
    order = arrange(k.float())
    records = close(k, v)
    border = (order < 32) | (order >= 1024 - 32)
    for codes, tokens in ((records.keys(), k.float()), (records.rotated_values(), rotate(v.float()))):
        exact = tokens.gather(1, order[..., None].expand(-1, -1, 64))
        error = (codes.flatten(1, 2) - exact).square().sum(-1)
        assert error[border].mean().sqrt() <= 1.05 * error[~border].mean().sqrt()


# ------------------------------------------------------------------------------------------ records as bytes


def segment_pool(layout: SegmentLayout, slots: int) -> tuple[SegmentPool, list[torch.Tensor]]:
    pool = ReferenceKernels("test").allocate_segments(layout, slots)
    payloads = [zeroed_bytes(layout.segment_payload_bytes) for _ in range(slots)]
    pool.payloads.copy_(torch.tensor([payload.data_ptr() for payload in payloads]))
    return pool, payloads


@pytest.mark.parametrize("dim", [64, 80, 256])
@pytest.mark.parametrize("tokens", [SEGMENT_TOKENS, SEGMENT_TOKENS - SINK_TOKENS])
def test_records_come_back_from_their_bytes(dim: int, tokens: int) -> None:
    layout = SegmentLayout(1, 2, dim)
    pool, payloads = segment_pool(layout, 2)
    records = close(lumpy(2, tokens, dim), lumpy(2, tokens, dim, 1))
    write_records(records, pool, 1, 0)
    back = read_records(pool, 1, 0, 2)
    for name in Records.__slots__:
        assert torch.equal(getattr(back, name), getattr(records, name)), name
    # One element of each interleaved array at the place that `tiers` names.
    record = payloads[1][layout.payload_bytes :]
    unit, token, channel = 5, 11, 14
    at = layout.payload_offsets["k"] + ((unit * (dim // 4) + channel // 4) * 16 + token) * 4 + channel % 4
    assert record[at] == records.k[1, unit, token, channel]
    at = layout.payload_offsets["v"] + ((unit * 4 + token // 4) * dim + channel) * 4 + token % 4
    assert record[at].view(torch.int8) == records.v[1, unit, token, channel]
    summary = pool.summaries[layout.segment_summary_bytes + layout.summary_bytes :]
    unit = 35
    for channel in (6, dim // 2 + 1):
        word, high = channel % (dim // 2) // 4, channel >= dim // 2
        at = layout.summary_offsets["mean"] + ((unit // 16 * (dim // 8) + word) * 16 + unit % 16) * 4
        assert int(summary[at + channel % 4]) >> 4 * high & 15 == records.mean[1, unit, channel]
        place = (unit // 16 * 4 + token // 4) * (dim // 8) + word
        at = layout.summary_offsets["signs"] + (place * 4 + token % 4) * 16 + unit % 16
        assert int(summary[at]) >> 4 * high + channel % 4 & 1 == records.signs[1, unit, token, channel]
    for unit in (35, 42):
        at = layout.summary_offsets["spread"] + ((unit // 16 * 4 + token // 4) * 2 + token % 2) * 16 + unit % 16
        assert int(summary[at]) >> token % 4 // 2 * 4 & 15 == records.spread[1, unit, token]


def test_the_bytes_of_a_record_change_only_with_the_format_version() -> None:
    """What an older version kept on disk is found by name: other bytes under the same name would be wrong answers.

    Where this fails for a good reason, raise `TIER_FORMAT_VERSION` and renew the digest.
    """
    pool, payloads = segment_pool(SegmentLayout(1, 1, 64), 1)
    token, channel = torch.arange(SEGMENT_TOKENS)[:, None], torch.arange(64)
    k = ((token * 37 + channel * channel * 11 + token % 7 * channel) % 97 - 48) / 16
    v = ((token * 53 + channel * 29) % 89 - 44) / 32
    write_records(close(k[None].bfloat16(), v[None].bfloat16()), pool, 0, 0)
    digest = hashlib.sha256(pool.summaries.numpy().tobytes() + payloads[0].numpy().tobytes()).hexdigest()[:16]
    assert (TIER_FORMAT_VERSION, digest) == (2, "91361c721b66030b")


def test_an_empty_slot_is_refused() -> None:
    pool = ReferenceKernels("test").allocate_segments(SegmentLayout(1, 1, 16), 1)
    with pytest.raises(ValueError, match="slot 0"):
        read_records(pool, 0, 0, 1)


# ------------------------------------------------------------------------------------------ attention


def tiers(heads: HeadShape, seed: int, segments: int = 2) -> tuple[Near, Far]:
    """A small sequence: 32 near tokens, segments of 272 tokens, all at scaled-down size."""
    parts = [
        close(
            lumpy(heads.num_kv_heads, 272, heads.head_dim, seed + i), lumpy(heads.num_kv_heads, 272, heads.head_dim)
        )
        for i in range(segments)
    ]
    far = tier_attention.far_of([(part, 272 * (i + 1)) for i, part in enumerate(parts)])
    end = 272 * segments
    own = lumpy(heads.num_kv_heads, 32, heads.head_dim, seed + 9).float()
    return Near(own, own.flip(-1), torch.arange(end, end + 32)), far


def plain(q: torch.Tensor, positions: torch.Tensor, near: Near, far: Far, heads: HeadShape) -> torch.Tensor:
    """Attention over everything, written out: values rotated back first, one head at a time."""
    k = torch.cat([near.k, far.k.flatten(1, 2)], 1)
    v = torch.cat([near.v, rotate(far.v.flatten(1, 2))], 1)
    seen = torch.cat([near.positions, torch.full((far.k[0, :, :, 0].numel(),), -1)]) <= positions[:, None]
    group = heads.num_q_heads // heads.num_kv_heads
    out = [
        ((q[:, head] @ k[head // group].T) * heads.scale).masked_fill(~seen, -torch.inf).softmax(-1)
        @ v[head // group]
        for head in range(heads.num_q_heads)
    ]
    return torch.stack(out, 1)


def rows(heads: HeadShape, near: Near, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    positions = near.positions.max() - torch.tensor([9, 4, 0])
    return torch.randn(3, heads.num_q_heads, heads.head_dim, generator=generator), positions


@RELAXED
@given(
    group=st.sampled_from([1, 2, 3, 7]),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from(DIMS),
    seed=st.integers(0, 99),
)
def test_reading_every_unit_is_dense_attention(group: int, kv_heads: int, dim: int, seed: int) -> None:
    heads = head_shape(group, kv_heads, dim)
    near, far = tiers(heads, seed)
    q, positions = rows(heads, near, seed)
    expected = plain(q, positions, near, far, heads)
    torch.testing.assert_close(tier_attention.dense(q, positions, near, far, heads), expected, rtol=1e-4, atol=1e-4)
    for policy in (
        replace(OPEN, sparse=False),
        replace(OPEN, dense_tokens=10_000),
        replace(OPEN, dense_layers=1, dense_layer_tokens=10_000),
        replace(OPEN, window_tokens=10_000),
        replace(OPEN, top_p=1.0, topk_units=999),
        replace(OPEN, min_units=999, max_units=999),
    ):
        got, stats = tier_attention.hybrid(q, positions, near, far, heads, policy, 0)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert stats[:, 2].abs().max() == 0
        seen = (near.positions <= positions[:, None]).sum(-1)
        assert torch.equal(stats[:, 5], (seen + 16 * far.unit_end.numel()).float())


def test_without_summaries_only_selected_tokens_count() -> None:
    heads = head_shape(3, 1, 64)
    near, far = tiers(heads, 3)
    q, positions = rows(heads, near, 3)
    policy = replace(OPEN, summary_weight=0.0, top_p=1.0, topk_units=5)
    picked: list[torch.Tensor] = []

    def spy(scores: Scores) -> torch.Tensor:
        picked.append(tier_attention.by_mass(policy, 0)(scores))
        return picked[-1]

    got, _ = tier_attention.hybrid(q, positions, near, far, heads, policy, 0, choose=spy)
    for row in range(3):
        units = picked[0][0, row]
        assert units.sum() == 5
        some = replace(far, k=far.k[:, units], v=far.v[:, units])
        expected = plain(q[row : row + 1], positions[row : row + 1], near, some, heads)
        torch.testing.assert_close(got[row : row + 1], expected, rtol=1e-4, atol=1e-4)
    weighted, _ = tier_attention.hybrid(q, positions, near, far, heads, replace(policy, summary_weight=1.0), 0)
    dense = plain(q, positions, near, far, heads)
    assert relative(weighted, dense) < relative(got, dense)


@RELAXED
@given(seed=st.integers(0, 99), top_p=st.floats(0.05, 0.99), group=st.sampled_from([1, 3]))
def test_selection_is_the_smallest_set_that_holds_the_mass(seed: int, top_p: float, group: int) -> None:
    heads = head_shape(group, 2, 64)
    near, far = tiers(heads, seed)
    q, positions = rows(heads, near, seed)
    policy = replace(OPEN, top_p=top_p, min_units=1, max_units=20)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def spy(scores: Scores) -> torch.Tensor:
        seen.append((tier_attention.estimated_mass(scores), tier_attention.by_mass(policy, 0)(scores)))
        return seen[-1][1]

    tier_attention.hybrid(q, positions, near, far, heads, policy, 0, choose=spy)
    mass, chosen = seen[0]
    for head, row in itertools.product(range(2), range(3)):
        of_unit, picked = mass[head, row], chosen[head, row]
        assert of_unit[picked].min() >= of_unit[~picked].max()
        held, wanted = of_unit[picked].sum(), top_p * mass[head, row].sum()
        assert held >= wanted * (1 - 1e-5) or picked.sum() == 20
        assert held - of_unit[picked].min() < wanted * (1 + 1e-5) or picked.sum() == 1


def test_first_layers_get_four_times_the_budget() -> None:
    heads = head_shape(1, 1, 64)
    near, far = tiers(heads, 0)
    q, positions = rows(heads, near, 0)
    policy = replace(OPEN, top_p=1.0, topk_units=3, dense_layers=1, dense_layer_tokens=0)
    exact = [tier_attention.hybrid(q, positions, near, far, heads, policy, layer)[1][0, 5] for layer in (0, 1)]
    assert exact[0] - exact[1] == 9 * 16


def test_units_not_read_enter_by_their_sketched_mass() -> None:
    heads = head_shape(2, 1, 64)
    near, far = tiers(heads, 0, segments=4)
    q, positions = rows(heads, near, 0)
    policy = replace(OPEN, min_units=1, max_units=4, top_p=0.5)
    dense = plain(q, positions, near, far, heads)
    errors = []
    for weight in (1.0, 0.0):
        out, stats = tier_attention.hybrid(
            q, positions, near, far, heads, replace(policy, summary_weight=weight), 0
        )
        errors.append(relative(out, dense))
        torch.testing.assert_close(stats[:, :3].sum(1), torch.ones(3))
        assert (stats[:, 3] <= stats[:, 2] + 1e-6).all()
        assert ((stats[:, 4] > 0) & (stats[:, 4] <= 1)).all()
    assert errors[0] < 0.35
    assert errors[0] < errors[1]


# ------------------------------------------------------------------------------------------ through the kernels


class Bench:
    """Two sequences in one block pool: one with two closed segments, one with none."""

    LENGTHS = (4300, 70)

    def __init__(self, heads: HeadShape) -> None:
        self.kernels, self.heads = ReferenceKernels("test"), heads
        layout = KVLayout(2, heads.num_kv_heads, heads.head_dim, "bf16")
        generator = torch.Generator().manual_seed(7)
        blocks = torch.randperm(160, generator=generator).int()
        self.full = torch.full((2, 136), -1, dtype=torch.int32)
        self.full[0, :135], self.full[1, :3] = blocks[:135], blocks[135:138]
        self.pool: KVPool = self.kernels.allocate_pool(layout, 160)
        numbers = self.pool.data.view(torch.bfloat16)
        numbers.copy_(torch.randn(numbers.numel(), generator=generator))
        self.segments, self._payloads = segment_pool(SegmentLayout(2, heads.num_kv_heads, heads.head_dim), 3)
        for segment, slot in enumerate((2, 0)):
            table = self.full[0, 64 * segment : 64 * (segment + 1)].clone()
            if segment == 0:
                table[:2] = -1
            records = self.segments.layout.records
            self.kernels.close_records(self.pool, table, self.segments, slot, 0, records - 1)
            self.kernels.close_records(self.pool, table, self.segments, slot, records - 1, 1)
        self.released = self.full.clone()
        self.released[0, 2:128] = -1
        self.q = torch.randn(2, heads.num_q_heads, heads.head_dim, generator=generator).to(torch.bfloat16)

    def batch(self, policy: AttentionPolicy | None, stats: torch.Tensor | None = None) -> RaggedBatch:
        """Without a policy: everything bf16."""
        lengths = torch.tensor(self.LENGTHS, dtype=torch.int32)
        bounds = torch.tensor([0, 1, 2], dtype=torch.int32)
        if policy is None:
            return RaggedBatch(bounds, lengths, self.full)
        tables = torch.tensor([[2, 0], [-1, -1]], dtype=torch.int32)
        counts = torch.tensor([2, 0], dtype=torch.int32)
        closed = SegmentBatch(self.segments, tables, counts, (policy, policy), stats)
        return RaggedBatch(bounds, lengths, self.released, closed)


@pytest.fixture(scope="module", params=[(3, 2, 64), (1, 1, 80)], ids=["gqa64", "mha80"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(head_shape(*request.param))


def test_prefill_and_dense_decode_over_segments(bench: Bench) -> None:
    exact = bench.kernels.attention(bench.q, bench.pool, 1, bench.batch(None), bench.heads).float()
    policy = AttentionPolicy(sparse=False)
    prefill = bench.kernels.attention(bench.q, bench.pool, 1, bench.batch(policy), bench.heads).float()
    decode = bench.kernels.decode_attention(bench.q, bench.pool, 1, bench.batch(policy), bench.heads).float()
    assert relative(prefill, exact) < 0.02
    torch.testing.assert_close(decode, prefill, rtol=0.01, atol=0.002)
    torch.testing.assert_close(decode[1], exact[1], rtol=0.01, atol=0.002)  # the sequence without segments


def test_decode_writes_stats_of_its_layer(bench: Bench) -> None:
    stats = torch.full((2, 2, 6), -1.0)
    policy = AttentionPolicy(min_units=8, max_units=8, window_tokens=128)
    batch = bench.batch(policy, stats)
    bench.kernels.decode_attention(bench.q, bench.pool, 1, batch, bench.heads, window=100)
    assert (stats == -1).all()
    bench.kernels.decode_attention(bench.q, bench.pool, 1, without_dense_layers(batch), bench.heads)
    assert (stats[:, 0] == -1).all()
    assert stats[0, 1, 5] == SINK_TOKENS + 4300 - 4096 + 8 * 16
    assert stats[1, 1].tolist()[:4] == pytest.approx([1, 0, 0, 0])
    assert stats[1, 1, 5] == 70


def without_dense_layers(batch: RaggedBatch) -> RaggedBatch:
    segments = batch.segments
    assert segments is not None
    return replace(
        batch, segments=replace(segments, policies=tuple(replace(p, dense_layers=0) for p in segments.policies))
    )


def test_window_layers_read_only_blocks(bench: Bench) -> None:
    policy = AttentionPolicy()
    got = bench.kernels.decode_attention(bench.q, bench.pool, 0, bench.batch(policy), bench.heads, window=150)
    exact = bench.kernels.attention(bench.q, bench.pool, 0, bench.batch(None), bench.heads, window=150)
    assert torch.equal(got, exact)


def test_closing_does_not_depend_on_how_records_are_split(bench: Bench) -> None:
    layout = bench.segments.layout
    again, _payloads = segment_pool(layout, 1)
    bench.kernels.close_records(bench.pool, bench.full[0, 64:128], again, 0, 0, layout.records)
    for record in range(layout.records):
        one, other = read_records(bench.segments, 0, record, 1), read_records(again, 0, record, 1)
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in Records.__slots__)


def test_sinks_are_in_no_record(bench: Bench) -> None:
    k, _ = gather_kv(bench.pool, 0, bench.full[0], SEGMENT_TOKENS)
    records = read_records(bench.segments, 2, 0, 1)
    assert records.k.shape[1] * 16 == SEGMENT_TOKENS - SINK_TOKENS
    mean = records.keys()[0].flatten(0, 1).mean(0)
    torch.testing.assert_close(mean, k[0, SINK_TOKENS:].mean(0), rtol=0, atol=2e-3)
