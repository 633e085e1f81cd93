#!/usr/bin/env python3
"""Makes the golden vectors beside it: quantized matrices of every format, from first principles.

Nothing of Moiety is used: codes are found by searching the list of a format's values in exact
arithmetic, float32 operations are NumPy's (one IEEE operation each, subnormals kept), random bits
and the Hadamard transform are written out here. The definition is docs/spec/formats.md
(docs/formats.md says it in short); the vectors that it lists are checked before anything is
written.

  python3 make_golden.py           writes inputs.json and FORMAT.json
  python3 make_golden.py --check   compares the files with what would be written; exit code 1 if
                                   they differ

inputs.json  {NAME: {"dtype": "float32" | "bfloat16", "rows", "cols", "data"}}
FORMAT.json  [{"name", "input", "options": {...}, "expect": {"row_data": ..., "row_scales": ...,
             "col_data", "col_scales", "amax", "tensor_scale", "flags"}, "layouts": {...}}]

Arrays are hexadecimal, byte by byte as they lie in memory (little-endian), row-major. What an array
of a format is, and its shape: docs/formats.md. Options left out have the format's default; col is
there unless "directions" is "row". amax, tensor_scale and flags have an entry for each direction.
"layouts" has the scales in the layouts that GEMMs want.
"""

import json
import sys
from bisect import bisect_right
from fractions import Fraction
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
F32, U32, U64 = np.float32, np.uint32, np.uint64
FLT_MAX, NAN = F32(np.finfo(F32).max), np.array(0x7FFFFFFF, U32).view(F32)[()]
np.seterr(all="ignore")


# ---- values and codes

def bits(x):
    return np.asarray(x, F32).view(U32)


def of_bits(b):
    return np.asarray(b, U32).view(F32)


class Grid:
    """A minifloat: all its non-negative values in the order of their codes."""

    def __init__(self, exponent_bits, mantissa_bits, bias, last_code, nan):
        self.sign, self.nan = 1 << (exponent_bits + mantissa_bits), nan
        self.values = []
        for code in range(last_code + 1):
            e, m = divmod(code, 1 << mantissa_bits)
            significand = Fraction(m, 1 << mantissa_bits) + (e > 0)
            self.values.append(significand * Fraction(2) ** (max(e, 1) - bias))
        self.max = F32(self.values[-1])
        self.numbers = np.array([float(v) for v in self.values])  # exact, and so are the midpoints
        self.midpoints = (self.numbers[1:] + self.numbers[:-1]) / 2

    def with_sign(self, code, x):
        out = np.where(bits(x) >> 31 == 1, code | self.sign, code)
        return np.where(np.isnan(x), self.nan, out).astype(np.uint8)

    def nearest(self, x):
        a = np.abs(x).astype(np.float64)
        code = np.searchsorted(self.midpoints, a)  # midpoints below a
        tie = np.append(self.midpoints, np.inf)[code] == a
        return self.with_sign(np.where(np.isfinite(a) & tie & (code % 2 == 1), code + 1, code), x)

    def stochastic(self, x, r8):
        """The largest value <= fma((2 r8 + 1) / 512, step, |x|), with the sign of x."""
        def one(a, r):
            if not a < self.numbers[-1]:
                return len(self.values) - 1
            a = Fraction(float(a))
            at = bisect_right(self.values, a) - 1
            step = self.values[at + 1] - self.values[at]
            t = nearest_float(a + Fraction(2 * int(r) + 1, 512) * step)
            return bisect_right(self.values, t) - 1

        code = [one(a, r) for a, r in zip(np.abs(x).ravel(), r8.ravel())]
        return self.with_sign(np.array(code, np.int64).reshape(x.shape), x)

    def decode(self, code):
        values = self.numbers[np.minimum(code, len(self.numbers) - 1)].astype(F32)
        return np.where(code == self.nan, NAN, values)


E2M1, E4M3, E5M2 = Grid(2, 1, 1, 7, 0x7), Grid(4, 3, 7, 0x7E, 0x7F), Grid(5, 2, 15, 0x7B, 0x7F)
ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2}


def nearest_float(q):
    """A positive rational, rounded to float32, ties to even."""
    e = max(q.numerator.bit_length() - q.denominator.bit_length() - 1, -126)
    while q >= Fraction(2) ** (e + 1):
        e += 1
    unit = Fraction(2) ** (e - 23)
    return round(q / unit) * unit


def power_above(v):
    """E8M0 byte of the least power of two >= v, v finite; 0 below the range, 254 above."""
    powers = np.array([2.0 ** (c - 127) for c in range(255)])
    return np.minimum(np.searchsorted(powers, np.asarray(v, np.float64)), 254).astype(np.uint8)


def bf16(x):
    """Rounded to bfloat16, as float32: the nearest multiple of 2^16 of the bits, ties to even."""
    b = bits(x).astype(U64)
    low, kept = b & U64(0xFFFF), b >> U64(16)
    up = (low > 0x8000) | ((low == 0x8000) & (kept % U64(2) == 1))
    out = ((kept + up) << U64(16)).astype(U32)
    return of_bits(np.where(np.isnan(x), U32(0x7FFF0000), out))


def amax(x, axis=None):
    """The largest |x| by bits, so that NaN is above infinity; 0 of nothing."""
    return of_bits(np.max(bits(x) & U32(0x7FFFFFFF), axis=axis, initial=0))


# ---- random bits

def philox(key, counter):
    """Philox4x32-10 (Salmon et al., 2011): key 2 words, counter 4 arrays of words."""
    mask, k = U64(0xFFFFFFFF), [U64(w) for w in key]
    c = [np.asarray(w, U64) for w in np.broadcast_arrays(*counter)]
    for _ in range(10):
        a, b = U64(0xD2511F53) * c[0], U64(0xCD9E8D57) * c[2]
        c = [(b >> U64(32)) ^ c[1] ^ k[0], b & mask, (a >> U64(32)) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + U64(0x9E3779B9)) & mask, (k[1] + U64(0xBB67AE85)) & mask]
    return np.stack(c, -1).astype("<u4")


def block_bytes(o, b, direction):
    """16 random bytes of each block number of an array."""
    b = np.asarray(b, U64)
    upper = ((b >> U64(32)) & U64(0x7FFF)) | U64(o.get("expert", 0) << 15 | direction << 31)
    words = philox((o["seed"] & 0xFFFFFFFF, o["seed"] >> 32),
                   (b & U64(0xFFFFFFFF), upper, o["tensor_id"], o["draw"] & 0xFFFFFFFF))
    return words.view(np.uint8)


def random_bytes(o, direction, rows, cols):
    """One byte an element of a matrix that is X (direction 0) or its transpose (1)."""
    row0, col0, full = o.get("row0", 0), o.get("col0", 0), o.get("full_cols", 0)
    if direction == 1:
        row0, col0, full = col0, row0, o.get("full_rows", 0)
    per_row, blocks = -(-(full or cols) // 16), -(-cols // 16)
    b = (row0 + np.arange(rows))[:, None] * per_row + col0 // 16 + np.arange(blocks)
    return block_bytes(o, b, direction).reshape(rows, blocks * 16)[:, :cols]


# ---- quantization of a matrix in row form

def blocks_of(x, height, width):
    """The amax of each block of a matrix filled up with zeros."""
    rows, cols = -(-x.shape[0] // height), -(-x.shape[1] // width)
    full = np.zeros((rows * height, cols * width), F32)
    full[: x.shape[0], : x.shape[1]] = x
    return amax(full.reshape(rows, height, cols, width), axis=(1, 3))


def spread(blocks, height, width, shape):
    """The value of its block for every element."""
    return blocks.repeat(height, 0).repeat(width, 1)[: shape[0], : shape[1]]


def codes_of(grid, x, encode, o, direction):
    """x times `encode`, rounded; the NaN code where `encode` is NaN."""
    y = (x * encode).astype(F32)
    if o.get("rounding") == "stochastic":
        code = grid.stochastic(y, random_bytes(o, direction, *x.shape))
    else:
        code = grid.nearest(y)
    return np.where(np.isnan(encode), grid.nan, code).astype(np.uint8)


def fp8_scale(a, grid, o):
    """Encode and decode scale of an array of maxima."""
    floor = np.maximum(a, F32(o.get("amax_floor", 0)))
    s = np.where(floor == 0, F32(1), np.minimum(grid.max / floor, FLT_MAX)).astype(F32)
    if o["pow2"]:
        s = np.ldexp(F32(1), np.frexp(s)[1] - 1).astype(F32)  # rounded down
    s = np.where(np.isfinite(a), s, NAN).astype(F32)
    return s, np.where(np.isfinite(a), (F32(1) / s).astype(F32), NAN).astype(F32)


def quantize_fp8_tensor(x, o, A):
    grid = ELEMENTS[o["element"]]
    s, decode = fp8_scale(A, grid, o)
    code = codes_of(grid, x, np.full(x.shape, s), o, 0)
    return {"row_data": code, "col_data": code.T, "amax": np.array([A, A]),
            "tensor_scale": np.array([decode, decode])}


def quantize_fp8_block(x, o, height):
    grid = ELEMENTS[o["element"]]

    def half(m, direction):
        s, decode = fp8_scale(blocks_of(m, height, 128), grid, o)
        return codes_of(grid, m, spread(s, height, 128, m.shape), o, direction), decode
    code, scales = half(x, 0)
    if height > 1:
        return {"row_data": code, "row_scales": scales, "col_data": code.T}
    row = {"row_data": code, "row_scales": scales}
    return row | dict(zip(("col_data", "col_scales"), half(x.T, 1)))


def quantize_mxfp8(x, o, height):
    grid = ELEMENTS[o["element"]]
    inverse_max = (F32(1) / grid.max).astype(F32)

    def half(m, direction):
        a = blocks_of(m, height, 32)
        e = np.where(np.isfinite(a), power_above(a * inverse_max), 0xFF).astype(np.uint8)
        factor = np.where(e == 0xFF, NAN, np.ldexp(F32(1), 127 - e.astype(int)).astype(F32))
        return codes_of(grid, m, spread(factor, height, 32, m.shape), o, direction), e
    code, e = half(x, 0)
    if height > 1:
        return {"row_data": code, "row_scales": e}
    col_code, col_e = half(x.T, 1)
    return {"row_data": code, "row_scales": e, "col_data": col_code.T, "col_scales": col_e.T}


def nvfp4_half(x, o, A, height, direction):
    """Codes, block scales and tensor scale; A is one maximum or one a row."""
    A = np.reshape(A, (-1, 1))
    S = np.where(A == 0, F32(1), np.minimum(F32(2688) / A, FLT_MAX)).astype(F32)
    g = np.where(np.isfinite(A), (F32(1) / S).astype(F32), NAN).astype(F32)
    b = blocks_of(x, height, 16)
    sixth = F32(1) / F32(6)
    d = np.minimum((b * (S * sixth).astype(F32)).astype(F32), FLT_MAX)
    finite = np.isfinite(A) & np.isfinite(b)
    s = np.where(finite, E4M3.nearest(np.where(finite, d, F32(0))), 0x7F).astype(np.uint8)
    encode = np.minimum((F32(1) / (E4M3.decode(s) * g).astype(F32)).astype(F32), FLT_MAX)
    encode = np.where(finite, encode, NAN).astype(F32)
    return codes_of(E2M1, x, spread(encode, height, 16, x.shape), o, direction), s, g[:, 0]


def packed(code):
    """Two codes a byte, the first in the low half; rows are whole blocks of 16."""
    full = np.zeros((code.shape[0], -(-code.shape[1] // 16) * 16), np.uint8)
    full[:, : code.shape[1]] = code
    return full[:, 0::2] | full[:, 1::2] << 4


def hadamard(x, signs):
    """Blocks of 16 along the rows of x, filled up with zeros: signs, butterfly, a quarter, bf16."""
    w = np.zeros((x.shape[0], -(-x.shape[1] // 16), 16), F32)
    w.reshape(x.shape[0], -1)[:, : x.shape[1]] = bf16(x)
    flip = np.array([signs >> i & 1 for i in range(16)], bool)
    w = np.where(flip, -w, w)
    for h in (1, 2, 4, 8):
        pairs = w.reshape(*w.shape[:2], 16 // (2 * h), 2, h)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        w = np.stack([(a + b).astype(F32), (a - b).astype(F32)], -2).reshape(w.shape)
    return bf16((F32(0.25) * w).astype(F32)).reshape(x.shape[0], -1)


def quantize_nvfp4(x, o, A):
    if o.get("row_scaled"):
        A = amax(x, axis=1)
        code, s, g = nvfp4_half(x, o, A, 1, 0)
        return {"row_data": packed(code), "row_scales": s, "amax": A, "tensor_scale": g}
    code, s, g = nvfp4_half(x, o, A, 1, 0)
    y, A_col = x.T, A
    if o.get("rht"):
        y = hadamard(x.T, o.get("rht_signs", 0xD7E8))
        A_col = amax(y)
    col_code, col_s, col_g = nvfp4_half(y, o, A_col, 1, 1)
    return {"row_data": packed(code), "row_scales": s, "col_data": packed(col_code),
            "col_scales": col_s, "amax": np.array([A, A_col]),
            "tensor_scale": np.array([g[0], col_g[0]])}


def quantize_nvfp4_tile(x, o, A):
    code, s, g = nvfp4_half(x, o, A, 16, 0)
    return {"row_data": packed(code), "row_scales": s, "col_data": packed(code.T),
            "amax": np.array([A, A]), "tensor_scale": np.array([g[0], g[0]])}


FORMATS = {
    "fp8_tensor": quantize_fp8_tensor,
    "fp8_block_1x128": lambda x, o, A: quantize_fp8_block(x, o, 1),
    "fp8_block_128x128": lambda x, o, A: quantize_fp8_block(x, o, 128),
    "mxfp8": lambda x, o, A: quantize_mxfp8(x, o, 1),
    "mxfp8_tile32": lambda x, o, A: quantize_mxfp8(x, o, 32),
    "nvfp4": quantize_nvfp4,
    "nvfp4_tile16": quantize_nvfp4_tile,
}


def quantize(form, x, options):
    o = {"element": "e4m3", "pow2": form.startswith("fp8_block"), **options}
    A = of_bits(np.array(int(o["amax_given"], 16), U32))[()] if "amax_given" in o else amax(x)
    out = FORMATS[form](x, o, A)
    out.setdefault("tensor_scale", np.ones(2, F32))
    # Bit 0 for each direction: the transform of large numbers may overflow.
    y = hadamard(x.T, o.get("rht_signs", 0xD7E8)) if o.get("rht") else x
    out["flags"] = np.array([not np.isfinite(x).all(), not np.isfinite(y).all()], U32)
    if o.get("directions") == "row":
        out = {k: v for k, v in out.items() if not k.startswith("col")}
        # All arrays of mxfp8_tile32 serve both directions.
        if not o.get("row_scaled") and form != "mxfp8_tile32":
            out |= {k: out[k][:1] for k in ("amax", "tensor_scale", "flags") if k in out}
    return out


# ---- layouts of scales

def filled_up(s, rows, cols):
    out = np.zeros((-(-s.shape[0] // rows) * rows, -(-s.shape[1] // cols) * cols), s.dtype)
    out[: s.shape[0], : s.shape[1]] = s
    return out


def swizzled(s):
    """Tiles of 128 x 4 bytes: 32 lines of 16 bytes, in a line 4 rows that lie 32 apart."""
    p = filled_up(s, 128, 4)
    return p.reshape(p.shape[0] // 128, 4, 32, p.shape[1] // 4, 4).transpose(0, 3, 2, 1, 4).ravel()


LAYOUTS = {
    "sm100": swizzled,
    "padded": lambda s: filled_up(s, 128, 4),
    "sm90": lambda s: filled_up(s, 4, 1).T,
}


def layouts_of(form, out, shape):
    """Scales of both directions, a row of them for each row of X or of its transpose."""
    height = {"fp8_block_128x128": 128, "mxfp8_tile32": 32, "nvfp4_tile16": 16}.get(form, 1)
    if form == "fp8_tensor":
        return {}
    row = out["row_scales"].repeat(height, 0)[: shape[0]]
    col = out.get("col_scales", out["row_scales"].T)
    col = (col.T if form == "mxfp8" else col).repeat(height, 0)[: shape[1]]
    names = ["sm90"] if form.startswith("fp8") else ["sm100", "padded"]
    return {f"{n}.{d}": LAYOUTS[n](s) for n in names for d, s in (("row", row), ("col", col))}


# ---- inputs

def normal(rows, cols, which, exponents):
    """Nearly normal numbers, times a power of two for every 16 of a row, from 2^-e to 2^e."""
    i = np.arange(rows * cols)
    words = philox((0x676F6C64, which), (i & 0xFFFFFFFF, 0, 0, 0))
    x = (words.view(np.uint8).reshape(-1, 16).sum(1).astype(np.int64) - 2040) / 296
    e = philox((0x676F6C64, which), (i // 16, 1, 0, 0))[:, 0] % (2 * exponents + 1)
    return (x * 2.0 ** (e.astype(int) - exponents)).astype(F32).reshape(rows, cols)


def placed(rows, cols, which, values):
    """Normal numbers with some bit patterns among them."""
    x = normal(rows, cols, which, 2)
    for at, pattern in values.items():
        x.ravel()[at] = of_bits(U32(pattern))
    return x


def make_inputs():
    random = philox((1, 2), (np.arange(5 * 48), 7, 0, 0))[:, 0].copy()
    ties = np.array([k / 64 for k in range(-96, 96)]) * np.array([1, 4, 7, 16]).repeat(48)
    subnormal = (random[:120] & U32(0x807FFFFF)).reshape(3, 40)
    return {
        "ramp": (np.arange(16, dtype=F32) - F32(7.5)).reshape(1, 16),
        "ones": np.ones((16, 1), F32),
        "wide": bf16(normal(17, 133, 1, 6)),
        "tall": normal(133, 17, 2, 6),
        "shard": bf16(normal(20, 40, 3, 1)),
        "steps": np.linspace(-6, 6, 4 * 64, dtype=F32).reshape(4, 64),
        "ties": ties.astype(F32).reshape(4, 48),
        "zeros": of_bits(U32([0, 0x80000000] * 17)).reshape(2, 17),
        "one": placed(1, 1, 4, {}),
        "subnormal": of_bits(subnormal),
        "tiny": (normal(3, 40, 5, 3) * 2.0 ** -122).astype(F32),
        "huge_and_tiny": placed(17, 33, 6, {3: 0x7F7FFFFF, 40: 0xFF7FFFFF, 41: 1, 300: 0x00800000,
                                            301: 0x80000001}),
        "any_bits": of_bits(np.where(np.isfinite(of_bits(random)), random, U32(0xFF000001))
                            ).reshape(5, 48),
        "nan": placed(17, 33, 7, {100: 0xFFC12345}),
        "inf": placed(17, 33, 8, {200: 0x7F800000, 17: 0xFF800000}),
    }


BFLOAT16 = {"wide", "shard"}


# ---- cases

DRAW = {"rounding": "stochastic", "seed": 0x0123456789ABCDEF, "tensor_id": 7, "draw": 3}
SHARD = DRAW | {"expert": 6, "row0": 32, "col0": 16, "full_rows": 96, "full_cols": 83}
FAR = DRAW | {"directions": "row", "full_rows": 2 ** 34, "full_cols": 40, "draw": 2 ** 32 + 4}


def cases(form):
    """(name, input, options) of a format."""
    tile, fp4 = "tile" in form or form.endswith("128x128"), form.startswith("nvfp4")
    for name in ("ramp", "ones", "wide", "tall", "steps", "ties", "zeros", "one", "subnormal",
                 "tiny", "huge_and_tiny", "any_bits", "nan", "inf"):
        yield name, name, {}
    yield "ramp.stochastic", "ramp", DRAW
    yield "shard.stochastic", "shard", SHARD
    yield "far.stochastic", "shard", FAR | {"row0": 2 ** 33 + (16 if tile else 5)}
    for name in () if tile else ("wide", "steps", "subnormal", "huge_and_tiny", "nan"):
        yield f"{name}.stochastic", name, DRAW
    if not fp4:
        for name in ("ramp", "shard", "subnormal", "huge_and_tiny", "any_bits", "inf"):
            yield f"{name}.e5m2", name, {"element": "e5m2"}
        if not tile:
            yield "steps.e5m2.stochastic", "steps", DRAW | {"element": "e5m2"}
    if form.startswith("fp8"):
        other = {"pow2": form == "fp8_tensor"}
        for name in ("ramp", "shard", "tiny", "huge_and_tiny", "nan"):
            yield f"{name}.pow2_{'on' if other['pow2'] else 'off'}", name, other
        yield "tiny.floor", "tiny", {"amax_floor": 2.0 ** -100}
    if form in ("fp8_tensor", "nvfp4", "nvfp4_tile16"):
        for name in ("any_bits", "nan", "inf"):
            yield f"{name}.amax_given", name, {"amax_given": "42F60000"}  # 123
    if form == "nvfp4":
        for name in ("ones", "wide", "tall", "subnormal", "huge_and_tiny", "nan", "inf"):
            yield f"{name}.rht", name, {"rht": True}
        yield "tall.rht.signs", "tall", {"rht": True, "rht_signs": 0x1234}
        yield "shard.rht.stochastic", "shard", SHARD | {"rht": True}
        for name in ("wide", "huge_and_tiny", "nan"):
            yield f"{name}.row_scaled", name, {"directions": "row", "row_scaled": True}


def hexadecimal(array):
    return np.ascontiguousarray(array).tobytes().hex()


def make_files():
    inputs, files = make_inputs(), {"inputs": {}}
    for name, x in inputs.items():
        dtype, data = "float32", x
        if name in BFLOAT16:
            dtype, data = "bfloat16", (bits(x) >> 16).astype("<u2")
        files["inputs"][name] = {"dtype": dtype, "rows": x.shape[0], "cols": x.shape[1],
                                 "data": hexadecimal(data)}
    for form in FORMATS:
        files[form] = []
        for name, source, options in cases(form):
            out = quantize(form, inputs[source], options)
            case = {"name": name, "input": source, "options": options,
                    "expect": {k: hexadecimal(v) for k, v in out.items()}}
            if name in ("tall", "nan"):
                layouts = layouts_of(form, out, inputs[source].shape)
                case["layouts"] = {k: hexadecimal(v) for k, v in layouts.items()}
            files[form].append(case)
    return files


# ---- what docs/spec/formats.md lists

def expect(what, got, wanted):
    if str(got) != str(wanted):
        sys.exit(f"make_golden: {what}: got {got}, the contract has {wanted}")


def text(b):
    return bytes(np.ascontiguousarray(b, np.uint8)).hex(" ").upper()


def check_listed_values():
    def e(a):
        return power_above(F32(a) * of_bits(U32(0x3B124925)))
    for a, byte in ((448, 127), (449, 128), (447, 127), (224, 126), (6, 121), (1, 119), (1e-30, 19),
                    (0, 0), (FLT_MAX, 247)):
        expect(f"E8M0 byte of amax {a}", e(a), byte)
    expect("1/448", f"{bits(F32(1) / E4M3.max):08X}", "3B124925")
    expect("1/57344", f"{bits(F32(1) / E5M2.max):08X}", "37924925")
    for A, b, s in ((1, 1, 0x7E), (1, .5, 0x76), (4, 1, 0x6E), (10, .001, 0x13), (10, 1e-5, 0),
                    (100, 3, 0x55)):
        got = nvfp4_half(np.full((1, 16), b, F32), {}, F32(A), 1, 0)[1][0, 0]
        expect(f"NVFP4 block scale of {A}, {b}", f"{got:02X}", f"{s:02X}")

    # (100, 3): decoded block scale times g, its reciprocal.
    g = F32(1) / (F32(2688) / F32(100))
    expect("enc", f"{bits(F32(1) / (E4M3.decode(np.uint8(0x55)) * g)):08X}", "40045512")

    ramp = make_inputs()["ramp"]
    out = quantize("nvfp4", ramp, {})
    expect("NVFP4 tensor scale", f"{bits(out['tensor_scale'])[0]:08X}", "3B36DB6E")
    expect("NVFP4 bytes", text(out["row_data"]), "FF EE CD 9A 21 54 66 77")
    expect("NVFP4 block scale", text(out["row_scales"]), "7E")
    expect("random bytes", text(block_bytes(DRAW, 0, 0)),
           "BE 54 6B 77 93 FE C9 50 A1 EA 04 D3 8F 2E 12 C4")
    expect("col, expert field 6", text(block_bytes(DRAW | {"expert": 6}, 0, 1)),
           "0A 03 7C 08 A9 FD 55 F7 03 97 21 2A EB 98 0A 7C")
    expect("block 2^33 + 5", text(block_bytes(DRAW, 2 ** 33 + 5, 0)),
           "EA BD 06 4E 30 DF 2C BA 45 F1 E7 F5 28 91 B9 1F")
    expect("NVFP4 stochastic", text(quantize("nvfp4", ramp, DRAW)["row_data"]),
           "EF EE CD 9B 31 54 66 76")
    out = quantize("mxfp8", ramp, {})
    expect("MXFP8 exponent", out["row_scales"][0, 0], 122)
    expect("MXFP8 codes", text(out["row_data"]),
           "F7 F5 F3 F1 EE EA E4 D8 58 64 6A 6E 71 73 75 77")
    expect("RHT of ones", hadamard(np.ones((1, 16), F32), 0xD7E8)[0].astype(int).tolist(),
           [-1, 0, 1, 0, 1, 0, -1, 0, 1, 2, 1, 0, 1, 0, 1, -2])
    tile = np.arange(512, dtype=np.int64).reshape(128, 4)
    place = np.argsort(swizzled(tile))
    for r, c, offset in ((0, 3, 3), (1, 0, 16), (31, 0, 496), (32, 0, 4), (96, 0, 12),
                         (127, 3, 511)):
        expect(f"swizzled ({r}, {c})", place[4 * r + c], offset)
    for grid, top in ((E2M1, 6), (E4M3, 448), (E5M2, 57344)):
        expect("largest value", grid.max, F32(top))


def written(content):
    """JSON with a line for each entry."""
    if isinstance(content, list):
        return "[\n" + ",\n".join(map(json.dumps, content)) + "\n]\n"
    entries = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in content.items())
    return "{\n" + ",\n".join(entries) + "\n}\n"


def main():
    check_listed_values()
    stale = []
    for name, content in make_files().items():
        path, new = HERE / f"{name}.json", written(content)
        if sys.argv[1:] != ["--check"]:
            path.write_text(new)
        elif not path.exists() or path.read_text() != new:
            stale.append(path.name)
    if stale:
        sys.exit(f"make_golden: not what this script makes: {', '.join(stale)}")


if __name__ == "__main__":
    main()
