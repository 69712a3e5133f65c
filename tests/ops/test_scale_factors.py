"""Number formats by their tables, packed scale factors by their written layout, quantisation by its rule."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import scaled_naive as naive
import torch
from torch import Tensor

from ascend_deep import ops
from ascend_deep.ops import _sf

FORMATS = {"ue8m0x4": (torch.int32, 4), "ue8m0x2": (torch.int16, 2)}


def same(found: Tensor, wanted: list[Any]) -> bool:
    """Equal bit by bit as float32: NaN equals NaN, and zeros have signs."""
    expected = torch.tensor(wanted, dtype=torch.float32).reshape(found.shape)
    both = found.isnan() & expected.isnan()
    bits = torch.where(both, 0, found.contiguous().view(torch.int32))
    return bool(bits.equal(torch.where(both, 0, expected.view(torch.int32))))


def powers(*shape: int) -> Tensor:
    return torch.exp2(torch.randint(-127, 128, shape).float())


def code(scale: float) -> int:
    return round(math.log2(scale)) + 127


def test_all_ue8m0_codes() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    decoded = _sf.decode_ue8m0(codes)
    assert same(decoded, [naive.ue8m0(c) for c in range(256)])
    assert decoded[0] > 0 and decoded[255].isnan()
    torch.testing.assert_close(decoded, codes.view(torch.float8_e8m0fnu).float(), rtol=0, atol=0, equal_nan=True)
    assert _sf.encode_ue8m0(decoded).equal(codes)


def test_what_is_no_power_of_two_is_encoded_as_nan() -> None:
    for value in (0.0, -0.0, -1.0, 0.3, 3.0, 1.0000001, math.inf, -math.inf, math.nan, 1e-45, 2.0**-128):
        assert _sf.encode_ue8m0(torch.tensor([value])).tolist() == [255], value


def test_all_e4m3_codes_through_dequant() -> None:
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).reshape(16, 16)
    for scale in (1.0, 0.37, 2.0**-100, 2.0**120):
        out = ops.dequant(data, torch.full((1, 1), scale), gran=(16, 16))
        assert same(out, [naive.f32(naive.e4m3(b) * naive.f32(scale)) for b in range(256)])


def test_all_fp4_bytes_and_codes_through_dequant() -> None:
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(8, 32)
    wanted = [naive.f32(naive.e2m1(c) * naive.f32(0.7)) for b in range(256) for c in (b & 15, b >> 4)]
    for dtype in naive.FP4:
        assert same(ops.dequant(data.view(dtype), torch.full((8, 1), 0.7), gran=(1, 64)), wanted)
    assert sorted({abs(naive.e2m1(c)) for c in range(16)}) == list(naive.E2M1)


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_all_ue8m0_codes_through_packed_dequant(fmt: str) -> None:
    dtype, per = FORMATS[fmt]
    sf = torch.tensor(naive.words(list(range(256)), per), dtype=dtype).reshape(2, -1)
    one = torch.full((2, 128), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 1.0
    assert same(ops.dequant(one, sf, gran=(1, 1), sf_format=fmt), [naive.ue8m0(c) for c in range(256)])
    assert same(ops.unpack_sf(sf, k=128 * 32 - 5, gran_k=32), [naive.ue8m0(c) for c in range(256)])


def test_rounding_to_every_format_at_every_number_midpoint_and_neighbour() -> None:
    """Grid points, midpoints and the float32 next to them on both sides; the scale of the row is exactly 1."""
    for largest, grid, quantise in ((448.0, [naive.e4m3(b) for b in range(127)], "fp8"), (6.0, naive.E2M1, "fp4")):
        points = list(grid) + [(a + b) / 2 for a, b in itertools.pairwise(grid)]
        x = torch.tensor(points)
        x = torch.cat((x, x.nextafter(torch.tensor(math.inf)), x.nextafter(torch.tensor(0.0))))
        x = torch.cat((x, -x)).clamp(-largest, largest)[None]
        k = x.shape[1]
        if quantise == "fp8":
            data, sf = ops.quant_fp8(x, gran=(1, k), ue8m0=True)
            assert data.view(torch.uint8)[0].tolist() == [naive.to_e4m3(v) for v in x[0].tolist()]
        else:
            data, sf = ops.quant_fp4(x, gran_k=k)
            codes = [naive.to_e2m1(v) for v in x[0].tolist()]
            assert data.view(torch.uint8)[0].tolist() == [
                a | b << 4 for a, b in zip(codes[::2], codes[1::2], strict=True)
            ]
        assert sf.item() == 1.0


def naive_quant(x: Tensor, gran: tuple[int, int], largest: float, powers_of_two: bool) -> tuple[Tensor, list[Any]]:
    """Codes, uint8 of the shape of ``x``, and scales, matrix by matrix."""
    codes, scales = [], []
    encode = naive.to_e4m3 if largest == 448.0 else naive.to_e2m1
    for matrix in x.float().reshape(-1, *x.shape[-2:]).tolist() if x.numel() else []:
        divided, found = naive.quantise(matrix, gran, largest, powers_of_two)
        codes.append([[encode(v) for v in row] for row in divided])
        scales.append(found)
    return torch.tensor(codes, dtype=torch.uint8).reshape(x.shape), scales


def check_scales(sf: Tensor, scales: list[Any], fmt: str, rows: int) -> None:
    if fmt == "fp32":
        assert sf.dtype == torch.float32 and sf.is_contiguous()
        assert same(sf, scales)
        return
    dtype, per = FORMATS[fmt]
    wanted = [naive.words([code(s) for s in row], per) for matrix in scales for row in matrix]
    assert sf.dtype == dtype and sf.reshape(len(wanted), -1).tolist() == wanted
    assert sf.stride()[-2:] == (1, (rows + 3) // 4 * 4 if per == 4 else rows)


@pytest.mark.parametrize(("runner", "sample"), naive.cases("quant_fp8"))
def test_quant_fp8_is_the_rule_to_the_last_bit(runner: str, sample: ops.Sample) -> None:
    (x,), a = sample.args, sample.kwargs
    data, sf = naive.run(runner, "quant_fp8", sample)
    codes, scales = naive_quant(x, a["gran"], 448.0, a["ue8m0"])
    assert data.dtype == torch.float8_e4m3fn and data.is_contiguous()
    # The sign of NaN means nothing.
    found = data.view(torch.uint8)
    assert torch.where((found & 127) == 127, 127, found).equal(codes)
    if x.numel():
        check_scales(sf, scales, a["sf_format"], x.shape[-2])
    rows, groups = (-(-x.shape[d] // a["gran"][d]) for d in (-2, -1))
    per = 1 if a["sf_format"] == "fp32" else FORMATS[a["sf_format"]][1]
    assert sf.shape == (*x.shape[:-2], rows, -(-groups // per))


@pytest.mark.parametrize(("runner", "sample"), naive.cases("quant_fp4"))
def test_quant_fp4_is_the_rule_to_the_last_bit(runner: str, sample: ops.Sample) -> None:
    (x,), a = sample.args, sample.kwargs
    data, sf = naive.run(runner, "quant_fp4", sample)
    codes, scales = naive_quant(x, (1, a["gran_k"]), 6.0, True)
    assert data.dtype == torch.int8 and data.is_contiguous()
    assert data.view(torch.uint8).equal(codes[..., ::2] | codes[..., 1::2] << 4)
    if x.numel():
        check_scales(sf, scales, a["sf_format"], x.shape[-2])


@pytest.mark.parametrize(("runner", "sample"), naive.cases("dequant"))
def test_dequant_is_one_product(runner: str, sample: ops.Sample) -> None:
    (x, sf), a = sample.args, sample.kwargs
    out = naive.run(runner, "dequant", sample)
    data = naive.numbers(x)
    flat = (
        [naive.scale_of(s, *data.shape[-2:], a["gran"]) for s in sf.reshape(-1, *sf.shape[-2:])] if data.numel() else []
    )
    scales = torch.stack(flat).reshape(data.shape) if flat else data
    assert out.dtype == (a["out_dtype"] or torch.float32) and out.is_contiguous()
    torch.testing.assert_close(out, (data * scales).float().to(out.dtype), rtol=0, atol=0, equal_nan=True)


def test_zero_blocks_stay_zero_and_their_scale_is_finite() -> None:
    x = torch.randn(130, 300)
    x[:128, 128:256] = 0.0
    x[5] = 1e-30
    for gran in ((1, 32), (128, 128), (128, 1)):
        for ue8m0 in (False, True):
            data, sf = ops.quant_fp8(x, gran=gran, ue8m0=ue8m0)
            back = ops.dequant(data, sf, gran=gran)
            assert sf.isfinite().all() and (sf > 0).all() and back.isfinite().all()
            assert (back[:128, 128:256] == 0).all() and (back[129] != 0).any()
    data, sf = ops.quant_fp4(x)
    assert (ops.dequant(data, sf, gran=(1, 32))[:128, 128:256] == 0).all() and (sf > 0).all()


@pytest.mark.parametrize("runner", ["op", "reference"])
def test_the_reciprocal_of_the_scale_is_taken_first(runner: str) -> None:
    """x (1 / s) and x / s differ in the last bit, and next to a tie between two codes that shows."""
    amax = 1.0 + torch.rand(800, 1)
    ties = torch.tensor([(naive.e4m3(b) + naive.e4m3(b + 1)) / 2 for b in range(0x40, 0x70, 5)])
    s = (amax.double() / 448.0).float()
    x = torch.cat((amax, s * ties), 1)
    sample = ops.Sample("", (x,), {"gran": (1, x.shape[1]), "ue8m0": False, "sf_format": "fp32"})
    data, sf = naive.run(runner, "quant_fp8", sample)
    assert sf.equal(s)
    reciprocal = (1.0 / s.double()).float()

    def codes(divided: Tensor) -> list[int]:
        return [naive.to_e4m3(v) for v in divided.float().flatten().tolist()]

    wanted = codes(x.double() * reciprocal.double())
    assert data.view(torch.uint8).flatten().tolist() == wanted
    assert codes(x.double() / s.double()) != wanted


@pytest.mark.parametrize("value", [448.0, -448.0, 464.0, 465.0, 1000.0, 3e38])
def test_the_largest_number_of_a_block_saturates_at_most_to_448(value: float) -> None:
    x = torch.tensor([[value, value / 2, 0.0, 0.0]])
    for ue8m0 in (False, True):
        data, sf = ops.quant_fp8(x, gran=(1, 4), ue8m0=ue8m0)
        assert data.float().abs().max() <= 448 and data.float().isfinite().all()
        torch.testing.assert_close(ops.dequant(data, sf, gran=(1, 4)), x, rtol=2**-4, atol=0)


@pytest.mark.parametrize("lead", [(1,), (2,), (2, 1, 3), ()])
def test_leading_dimensions_are_a_batch_of_matrices(lead: tuple[int, ...]) -> None:
    x = torch.randn(*lead, 6, 40)
    for gran, fmt in (((4, 16), "fp32"), ((1, 16), "ue8m0x4"), ((1, 16), "ue8m0x2")):
        data, sf = ops.quant_fp8(x, gran=gran, ue8m0=True, sf_format=fmt)
        back = ops.dequant(data, sf, gran=gran, sf_format=fmt)
        pairs, sf4 = ops.quant_fp4(x, gran_k=8, sf_format=fmt)
        back4 = ops.dequant(pairs, sf4, gran=(1, 8), sf_format=fmt)
        assert data.shape == x.shape and pairs.shape == (*lead, 6, 20) and back.shape == back4.shape == x.shape
        for at in itertools.product(*map(range, lead)):
            one, one_sf = ops.quant_fp8(x[at], gran=gran, ue8m0=True, sf_format=fmt)
            assert data[at].view(torch.uint8).equal(one.view(torch.uint8)) and sf[at].equal(one_sf)
            assert back[at].equal(ops.dequant(one, one_sf, gran=gran, sf_format=fmt))
            one, one_sf = ops.quant_fp4(x[at], gran_k=8, sf_format=fmt)
            assert pairs[at].equal(one) and sf4[at].equal(one_sf)


def test_nan_and_infinity_do_what_the_module_says() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.tensor([[1.0, bad, -2.0, 3.0], [1.0, 2.0, 3.0, 4.0]])
        data, sf = ops.quant_fp8(x, gran=(1, 4))
        out = ops.dequant(data, sf, gran=(1, 4))
        assert out[0].isnan().all() and out[1].isfinite().all()
        data, sf = ops.quant_fp8(x, gran=(1, 4), ue8m0=True)
        assert sf[0, 0] == 2.0**127 and data.float()[0, [0, 2, 3]].eq(0).all()
        assert data[0, 1].float().isnan() if math.isnan(bad) else data[0, 1].float() == math.copysign(448, bad)
        data, sf = ops.quant_fp4(x, gran_k=4)
        found = ops.dequant(data, torch.ones_like(sf), gran=(1, 4))
        assert sf[0, 0] == 2.0**127 and found[0].tolist() == [0.0, -6.0 if bad == -math.inf else 6.0, 0.0, 0.0]


def logical_matrix(mn: int, groups: int) -> Tensor:
    return torch.exp2(torch.randint(-126, 128, (mn, groups)).float())


@pytest.mark.parametrize(("target", "fmt"), [("sm100", "ue8m0x4"), ("ascend", "ue8m0x2")])
def test_packing_follows_the_written_layout_and_round_trips_for_all_sizes(target: str, fmt: str) -> None:
    dtype, per = FORMATS[fmt]
    sizes = [(n, 1 + n % 9) for n in range(1, 131)] + [(1 + n % 5, n) for n in range(1, 131)]
    for mn, groups in sizes:
        k = 32 * groups - mn % 32
        sf = logical_matrix(mn, groups)
        packed = ops.pack_sf(sf, mn=mn, k=k, gran=(1, 32), target=target)
        wanted = [naive.words([code(s) for s in row], per) for row in sf.tolist()]
        assert packed.dtype == dtype and packed.tolist() == wanted
        pitch = (mn + 3) // 4 * 4 if target == "sm100" else mn
        assert packed.shape == (mn, -(-groups // per)) and packed.stride() == (1, pitch)
        # The same once more, in the memory of the result; nothing between the columns is left as it was.
        memory = packed.untyped_storage().nbytes() // packed.element_size()
        flat = torch.as_strided(packed, (memory,), (1,)).tolist()
        for at, word in enumerate(flat):
            column, row = divmod(at, pitch)
            assert word == (wanted[row][column] if row < mn else 0)
        assert ops.unpack_sf(packed, k=k, gran_k=32).equal(sf)


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_int32_and_int16_are_one_stream_of_bytes(fmt: str) -> None:
    sf = logical_matrix(6, 8)
    words = [ops.pack_sf(sf, mn=6, k=256, gran=(1, 32), target=t).contiguous() for t in ("sm100", "ascend")]
    assert words[0].view(torch.int16).equal(words[1])


def test_batches_are_packed_without_gaps_and_any_strides_are_taken() -> None:
    sf = torch.exp2(torch.randint(-9, 9, (5, 3, 6)).float()).permute(1, 2, 0)
    for target, pitch, per in (("sm100", 8, 4), ("ascend", 6, 2)):
        packed = ops.pack_sf(sf, mn=6, k=130, gran=(1, 32), target=target)
        assert packed.stride() == (pitch * -(-5 // per), 1, pitch)
        assert ops.unpack_sf(packed, k=130, gran_k=32).equal(sf)
        assert ops.unpack_sf(packed.contiguous()[1:], k=130, gran_k=32).equal(sf[1:])


def test_blocks_of_several_rows_are_repeated_and_groups_of_128_become_four_of_32() -> None:
    sf = logical_matrix(2, 3)
    for target, gran_k in (("sm100", 128), ("ascend", 32)):
        packed = ops.pack_sf(sf, mn=130, k=300, gran=(128, 128), target=target)
        back = ops.unpack_sf(packed, k=300, gran_k=gran_k)
        assert back.shape == (130, -(-300 // gran_k))
        for i in range(130):
            assert back[i].tolist() == [float(sf[i // 128, g * gran_k // 128]) for g in range(back.shape[1])]


def test_sm90_is_f32_with_rows_next_to_each_other() -> None:
    sf = torch.rand(5, 3) + 0.1  # powers of two are not asked for there
    out = ops.pack_sf(sf, mn=5, k=300, gran=(1, 128), target="sm90")
    assert out.equal(sf) and out.stride() == (1, 8) and out.data_ptr() != sf.data_ptr()
    memory = torch.as_strided(out, (2 * 8 + 5,), (1,))
    assert (memory[5:8] == 1).all() and (memory[13:16] == 1).all()
    blocks = ops.pack_sf(sf[:2].t(), mn=300, k=200, gran=(128, 128), target="sm90")
    assert blocks.equal(sf[:2].t()) and blocks.is_contiguous()


def naive_blocks(layout: list[int], grouping: str, alignment: int) -> list[tuple[int, int]]:
    out, start = [], 0
    for value in layout:
        end = start + value if grouping == "k_sizes" else value
        out.append((start, end))
        start = end if grouping == "k_sizes" else -(-end // alignment) * alignment
    return out


@pytest.mark.parametrize("target", ["sm90", "sm100", "ascend"])
@pytest.mark.parametrize("ends", [[5, 8, 13], [0, 0, 24], [3], [8, 8, 8, 24], []])
def test_rows_between_the_blocks_of_an_m_grouped_operand_are_one(target: str, ends: list[int]) -> None:
    gran_k = 128 if target == "sm90" else 32
    sf = logical_matrix(24, -(-300 // gran_k))
    inside = [any(a <= i < b for a, b in naive_blocks(ends, "psum", 8)) for i in range(24)]
    garbage = sf.clone()
    for i in range(24):
        if not inside[i]:
            garbage[i], sf[i] = (math.nan, -3.0, math.inf, 0.1)[i % 4], 1.0
    layout = torch.tensor(ends, dtype=torch.int32)
    args: dict[str, Any] = {"mn": 24, "k": 300, "gran": (1, gran_k), "target": target, "alignment": 8}
    out = ops.pack_sf(garbage, grouped_layout=layout, grouping="psum", **args)
    assert out.equal(ops.pack_sf(sf, **args))


@pytest.mark.parametrize(
    ("grouping", "layout", "alignment"),
    [
        ("k_psum", [200, 384, 1000], 384),
        ("k_psum", [128, 128, 257, 600], 128),
        ("k_psum", [0, 0], 256),
        ("k_sizes", [256, 0, 640], 128),
        ("k_sizes", [128, 128, 384, 384], 128),
        ("k_sizes", [], 128),
    ],
)
@pytest.mark.parametrize(("target", "gran_k"), [("sm90", 128), ("sm100", 32), ("sm100", 128), ("ascend", 32)])
def test_blocks_along_k(grouping: str, layout: list[int], alignment: int, target: str, gran_k: int) -> None:
    groups = 1024 // gran_k
    sf = logical_matrix(6, groups)
    blocks = naive_blocks(layout, grouping, alignment)
    used = [range(a // gran_k, -(-b // gran_k)) for a, b in blocks]
    dirty = sf.clone()
    for g in set(range(groups)) - {g for block in used for g in block}:
        dirty[:, g] = -5.0
    out = ops.pack_sf(
        dirty,
        mn=6,
        k=1024,
        gran=(1, gran_k),
        target=target,
        grouped_layout=torch.tensor(layout, dtype=torch.int32),
        grouping=grouping,
        alignment=alignment,
    )
    for i, row in enumerate(sf.tolist()):
        if target == "sm90":
            wanted = [row[g] for block in used for g in block]
            wanted += [1.0] * (groups - len(wanted))
        elif target == "sm100":
            wanted = [w for block in used for w in naive.words([code(row[g]) for g in block], 4)]
            wanted += naive.words([127] * 4, 4) * ((groups + 3 * len(layout)) // 4 - len(wanted))
        else:
            inside = {g for block in used for g in block}
            wanted = naive.words([code(row[g]) if g in inside else 127 for g in range(groups)], 2)
        assert out[i].tolist() == wanted


def test_a_scale_that_is_no_power_of_two_is_refused_or_becomes_nan_but_is_never_rounded() -> None:
    sf = logical_matrix(3, 5)
    for bad in (0.3, 0.0, -2.0, math.inf):
        sf[1, 2] = bad
        for target in ("sm100", "ascend"):
            args: dict[str, Any] = {"mn": 3, "k": 160, "gran": (1, 32), "target": target}
            with pytest.raises(
                ValueError, match=r"pack_sf: sf holds -?[\d.inf]+, which is no power of two .* ue8m0=True"
            ):
                ops.pack_sf(sf, **args)
            # Where values are not looked at.
            full = {**args, "grouping": "none", "alignment": 128}
            packed = ops.reference("pack_sf")(sf, None, **full)
            back = ops.unpack_sf(packed, k=160, gran_k=32)
            assert back[1, 2].isnan() and back.isnan().sum() == 1
            with pytest.raises(ValueError, match="no power of two"):
                ops.op("pack_sf").debug(sf, None, **full)  # type: ignore[misc]
    sf[1, 2] = math.nan
    assert ops.unpack_sf(ops.pack_sf(sf, **args), k=160, gran_k=32)[1, 2].isnan()


def test_quantisers_write_what_pack_sf_packs() -> None:
    x = torch.randn(7, 300)
    for fmt, target in (("ue8m0x4", "sm100"), ("ue8m0x2", "ascend")):
        data, sf = ops.quant_fp8(x, gran=(1, 32), ue8m0=True)
        packed = ops.pack_sf(sf, mn=7, k=300, gran=(1, 32), target=target)
        other, words = ops.quant_fp8(x, gran=(1, 32), ue8m0=True, sf_format=fmt)
        assert (
            words.equal(packed)
            and words.stride() == packed.stride()
            and other.view(torch.uint8).equal(data.view(torch.uint8))
        )
        assert ops.dequant(data, words, gran=(1, 32), sf_format=fmt).equal(ops.dequant(data, sf, gran=(1, 32)))
