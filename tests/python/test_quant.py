"""Formats: what arrays mean, transposes, layouts of scales, partial casts; devices have the same bits."""

import dataclasses

import pytest
import torch

import moiety
from moiety import quant

TILES = ("fp8_block_tile", "mxfp8_tile", "nvfp4_tile")
SHAPES = [(70, 100), (1, 1), (128, 256), (0, 5), (33, 16)]


def values(rows, cols, dtype=torch.float32, seed=1):
    torch.manual_seed(seed)
    return (torch.randn(rows, cols) * torch.rand(rows, 1) * 3).to(dtype)


def arrays(q):
    return {n: t for n in ("row", "row_scales", "col", "col_scales", "amax", "tensor_scale", "flags")
            if (t := getattr(q, n)) is not None}


def same(a, b):
    """The same bytes in the arrays that both have."""
    a, b = arrays(a), arrays(b)
    assert a.keys() == b.keys()
    for name, t in a.items():
        assert t.dtype == b[name].dtype and t.shape == b[name].shape, name
        bits = [x.contiguous().view(torch.uint8).cpu() for x in (t, b[name])]
        assert torch.equal(*bits), name


def decoded(codes, cols):
    """Codes as numbers, by torch or, of FP4, by a table."""
    if codes.dtype != torch.float4_e2m1fn_x2:
        return codes.double()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6],
                         dtype=torch.float64)
    bytes_ = codes.view(torch.uint8).long()
    return table[torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(1)][:, :cols]


@pytest.mark.parametrize("format", quant.FORMATS)
@pytest.mark.parametrize("rows,cols", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_codes_times_scales(format, rows, cols, dtype):
    x = values(rows, cols, dtype)
    q = quant.quantize(x, format, "both")
    got = quant.dequantize(q)
    want = decoded(q.row, cols)
    if q.row_scales is not None:
        high, wide = -(-rows // max(1, q.row_scales.shape[0])), 1
        high = {"fp8_block_tile": 128, "mxfp8_tile": 32, "nvfp4_tile": 16}.get(format, 1)
        wide = {"fp8": 128, "mxfp": 32, "nvfp": 16}["fp8" if format.startswith("fp8") else format[:4]]
        scales = q.row_scales.double().repeat_interleave(high, 0).repeat_interleave(wide, 1)
        want = want * scales[:rows, :cols]
    want = want * q.tensor_scale[0].double()
    assert got.shape == x.shape
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=0)
    bound = 0.2 if format.startswith("nvfp4") else 0.08
    assert (got.double() - x.double()).norm() <= bound * x.double().norm()
    back = quant.dequantize(q, torch.bfloat16, "row")
    assert torch.equal(back, got.bfloat16())
    assert (q.flags == 0).all()


@pytest.mark.parametrize("format", quant.FORMATS)
def test_columns_are_rows_of_the_transpose(format):
    x = values(70, 100)
    q = quant.quantize(x, format, "col")
    want = quant.dequantize(quant.quantize(x.t().contiguous(), format, "row"))
    got = quant.dequantize(q, direction="col")
    assert torch.equal(got if got.shape == want.shape else got.t(), want)


@pytest.mark.parametrize("format", ["fp8", *TILES])
@pytest.mark.parametrize("rows,cols", SHAPES)
def test_transpose_is_the_direct_cast(format, rows, cols):
    x = values(rows, cols)
    same(quant.transpose(quant.quantize(x, format, "row")), quant.quantize(x, format, "both"))


@pytest.mark.parametrize("format", quant.FORMATS)
@pytest.mark.parametrize("rows,cols", [(0, 32), (32, 0), (0, 0), (1, 1)])
def test_without_elements_and_with_one(format, rows, cols):
    x = values(rows, cols)
    y = quant.dequantize(quant.quantize(x, format, "both"), torch.float32)
    assert y.shape == (rows, cols) and torch.isfinite(y).all()


def test_transpose_of_other_formats_is_refused():
    for format in ("nvfp4", "fp8_block"):
        with pytest.raises(moiety.Unsupported, match="different roundings"):
            quant.transpose(quant.quantize(values(4, 32), format))


def test_amax_stochastic_rounding_and_flags():
    x = values(64, 64)
    amax = quant.compute_amax(x, "nvfp4")
    assert torch.equal(amax[0], x.abs().max())
    same(quant.quantize(x, "nvfp4", "both"), quant.quantize(x, "nvfp4", "both", amax=amax))
    wide = quant.quantize(x, "nvfp4", amax=amax * 2)
    assert wide.tensor_scale[0] == 2 * quant.quantize(x, "nvfp4").tensor_scale[0]
    state = [torch.tensor([7, draw]) for draw in (0, 0, 1)]
    a, b, c = (quant.quantize(x, "nvfp4", stochastic=s) for s in state)
    same(a, b)
    assert not torch.equal(a.row.view(torch.uint8), c.row.view(torch.uint8))
    x[3, 5] = float("nan")
    assert quant.quantize(x, "mxfp8").flags == 1


def test_hadamard_transform_is_undone():
    x = values(64, 48)
    q = quant.quantize(x, "nvfp4", "col", rht=True)
    back = quant.dequantize(q, direction="col", undo_rht=True)
    assert (back.t() - x).norm() < 0.2 * x.norm()


@pytest.mark.parametrize("format", ["mxfp8", "fp8_block", "nvfp4"])
def test_groups_are_tensors_of_their_own(format):
    splits = torch.tensor([40, 0, 24])
    x = values(64, 96)
    q = quant.quantize(x, format, splits=splits)
    for e, (begin, end) in enumerate([(0, 40), (40, 40), (40, 64)]):
        one = quant.quantize(x[begin:end].contiguous(), format)
        assert torch.equal(q.row[begin:end].view(torch.uint8), one.row.view(torch.uint8))
        assert begin == end or torch.equal(q.tensor_scale[0, e], one.tensor_scale[0])
    if format == "nvfp4":
        with pytest.raises(moiety.Unsupported, match="grouped nvfp4"):
            quant.dequantize(q)
    else:
        assert torch.equal(quant.dequantize(q), quant.dequantize(quant.quantize(x, format)))


@pytest.mark.parametrize("format,layout,dtype", [("nvfp4", "sm100_swizzled", torch.uint8),
                                                 ("mxfp8_tile", "padded", torch.uint8),
                                                 ("fp8_block", "sm90_mn_major", torch.float32)])
def test_layouts_of_scales(format, layout, dtype):
    x = values(130, 160)
    q = quant.quantize(x, format, "both")
    for direction in ("row", "col"):
        out = quant.convert_scales(q, layout, direction)
        assert out.dtype == dtype
    rows, cols = 130, q.row_scales.shape[1]
    out = quant.convert_scales(q, layout)
    compact = q.row_scales if dtype == torch.float32 else q.row_scales.view(torch.uint8)
    if layout == "sm90_mn_major":
        assert torch.equal(out[:, :rows], compact.t())
    elif layout == "padded":
        assert torch.equal(out[:rows, :cols], compact.repeat_interleave(32, 0)[:rows])
    else:
        r, c = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
        at = (r // 128 * -(-cols // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        assert torch.equal(out[at], compact)
    with pytest.raises(moiety.InvalidArgument, match="layout is 'mine'"):
        quant.convert_scales(q, "mine")


def test_straight_through_gradient_and_pytree():
    x = values(32, 48).requires_grad_()
    for direction in ("row", "col"):
        x.grad = None
        y = quant.dequantize(quant.quantize(x, "nvfp4", direction, ste=True), direction=direction)
        grad = torch.randn_like(y)
        y.backward(grad)
        assert torch.equal(x.grad, grad if direction == "row" else grad.t())
    q = quant.quantize(x, "mxfp8")
    leaves, tree = torch.utils._pytree.tree_flatten(q)
    same(torch.utils._pytree.tree_unflatten(leaves, tree), q)


def test_compiled_cast_is_eager():
    torch._dynamo.reset()
    x = values(64, 96)

    def there_and_back(x):
        q = quant.quantize(x, "nvfp4_tile", "both")
        return quant.dequantize(q), q.col.view(torch.uint8)

    got = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x)
    assert all(torch.equal(a, b) for a, b in zip(got, there_and_back(x)))


OPCHECKED = [(f, d, g) for f in quant.FORMATS for d in ("row", "both") for g in (False, True)
             if not (g and f in TILES)]


@pytest.mark.parametrize("format,directions,grouped", OPCHECKED)
def test_opcheck(format, directions, grouped):
    x, o = values(40, 50), torch.ops.moiety
    spec = quant._spec(format, None, None)
    splits = torch.tensor([10, 30]) if grouped else None
    check = ("test_schema", "test_faketensor")
    torch.library.opcheck(o.quantize.default, (x, None, splits, None, *spec, False, False, True,
                                               directions == "both", 0), test_utils=check)
    if grouped:
        return
    if format == "fp8" or format.startswith("nvfp4"):
        torch.library.opcheck(o.compute_amax.default, (x, None, *spec, False, False), test_utils=check)
    q = quant.quantize(x, format, directions)
    stored = [quant._stored(t, q.tensor_scale) for t in (q.row, q.row_scales, q.col, q.col_scales)]
    for direction in ("row", "col") if directions == "both" else ("row",):
        torch.library.opcheck(o.dequantize.default, (*stored, q.tensor_scale, *spec, False, False, 40, 50,
                                                     direction, False, True), test_utils=check)


@pytest.mark.parametrize("call,text", [
    (lambda x: quant.quantize(x, "fp4"), "format is 'fp4'"),
    (lambda x: quant.quantize(x, "mxfp8", "rows"), "directions is 'rows'"),
    (lambda x: quant.quantize(x, "mxfp8", element="e2m1"), "e4m3 or e5m2"),
    (lambda x: quant.quantize(x[:, ::2], "mxfp8"), "not contiguous"),
    (lambda x: quant.quantize(x, "nvfp4_tile", rht=True), "rht_col"),
    (lambda x: quant.compute_amax(x, "mxfp8"), "amax")])
def test_errors(call, text):
    with pytest.raises(moiety.InvalidArgument, match=text):
        call(values(8, 32))


# ---- partial casts


def empty_like(q):
    """The same arrays, full of something else."""
    def other(t):
        return None if t is None else torch.full_like(t.view(torch.uint8), 0xA5).view(t.dtype)
    changed = {n: other(t) for n, t in arrays(q).items()}
    changed["flags"] = torch.zeros_like(q.flags)
    return dataclasses.replace(q, **changed)


def cast_by_ranks(masters, whole, shards):
    """The ranks' parts of a partial cast, joined as an all-gather of codes would."""
    targets = [[empty_like(q) for q in whole] for _ in shards]
    casts = [quant.PartialCast([m.flatten()[a:b] if b > a else None for m, (a, b) in zip(masters, ranges)],
                               t, ranges) for t, ranges in zip(targets, shards)]
    for cast in casts:
        cast._table.call("moiety_partial_amax", cast._reduction.data_ptr())
    for dtype, offset, size in casts[0]._regions:
        parts = [c._reduction[offset:offset + size].view(dtype) for c in casts]
        most = torch.stack(parts).max(0).values if size else parts[0]
        for part in parts:
            part.copy_(most)
    for cast in casts:
        cast._table.call("moiety_partial_cast", cast._reduction.data_ptr())
    return targets


@pytest.mark.parametrize("format", ["fp8", "fp8_block_tile", "mxfp8_tile", "nvfp4_tile", "mxfp8"])
@pytest.mark.parametrize("cuts", [(), (1234,), (0, 77), (16, 3001), (4000, 4000)])
def test_partial_casts_are_the_whole(format, cuts):
    masters = [values(50, 80), values(3, 5, seed=2), torch.zeros(8, 16)]
    masters[0][7, 9] = 300.0
    whole = [quant.quantize(m.bfloat16(), format) for m in masters]
    bounds = [[min(c, m.numel()) for c in (0, *cuts, m.numel())] for m in masters]
    shards = [[(b[r], b[r + 1]) for b in bounds] for r in range(len(cuts) + 1)]
    for rank, targets in enumerate(cast_by_ranks(masters, whole, shards)):
        for target, q, m, (begin, end) in zip(targets, whole, masters, shards[rank]):
            cols = m.shape[1]
            got, want = decoded(target.row, cols).flatten()[begin:end], decoded(q.row, cols).flatten()[begin:end]
            assert torch.equal(got, want)
            assert q.row_scales is None or torch.equal(target.row_scales.view(torch.uint8),
                                                       q.row_scales.view(torch.uint8))
            assert torch.equal(target.tensor_scale[0], q.tensor_scale[0])


def test_a_partial_cast_is_made_once_and_holds_addresses():
    master = values(32, 64)
    whole = quant.quantize(master.bfloat16(), "nvfp4_tile")
    target = empty_like(whole)
    cast = quant.PartialCast([master], [target], [(0, master.numel())])
    cast.step()
    assert torch.equal(target.row.view(torch.uint8), whole.row.view(torch.uint8))
    target.row.view(torch.uint8)[0, 0] ^= 1  # the comparison can fail
    assert not torch.equal(target.row.view(torch.uint8), whole.row.view(torch.uint8))
    master.mul_(2)
    quant.partial_cast([master], [target], [(0, master.numel())])
    quant.partial_cast([master], [target], [(0, master.numel())])
    twice = quant.quantize(master.bfloat16(), "nvfp4_tile")
    assert torch.equal(target.row.view(torch.uint8), twice.row.view(torch.uint8))
    cast.masters[0] = master.clone()
    with pytest.raises(moiety.InvalidArgument, match="has moved"):
        cast.step()
    with pytest.raises(moiety.InvalidArgument, match="1 masters, 1 targets, 0 ranges"):
        quant.PartialCast([master], [target], [])
    with pytest.raises(moiety.Error):
        quant.PartialCast([master], [target], [(0, master.numel() + 1)])
