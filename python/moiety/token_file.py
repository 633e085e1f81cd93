"""Token files, `.tok` (docs/spec/trainer.md#token-files), as `moiety prepare` writes them."""

import functools
import os
import struct
from array import array
from typing import Any

import numpy as np

NO_TOKEN = 0xFFFFFFFF
END_IN_EOS, START_WITH_BOS, HAS_LOSS_MASK, PIECES_HAVE_CHECKSUMS = 1, 2, 4, 8
HEADER_BYTES = 4096
PIECE_BYTES = 16 << 20
FLUSH_BYTES = PIECE_BYTES  # a divisor of a piece, so that no part lies in two
LANES = 4096


def _make_table() -> Any:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, np.uint32(0x82F63B78) ^ (table >> np.uint32(1)), table >> np.uint32(1))
    return table


TABLE = _make_table()
TABLE_LIST = TABLE.tolist()


def _apply(operator: Any, states: Any) -> Any:
    out = np.zeros_like(states)
    for bit in range(32):
        out ^= np.where((states >> np.uint32(bit)) & np.uint32(1), operator[bit], np.uint32(0))
    return out


@functools.lru_cache(maxsize=256)
def _append_zeros(count: Any) -> Any:
    """What `count` bytes of zeros do to a checksum's state: its image of every bit."""
    if count == 1:
        bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
        return TABLE[bits & np.uint32(255)] ^ (bits >> np.uint32(8))
    half = _append_zeros(count // 2)
    whole = _apply(half, half)
    return _apply(_append_zeros(1), whole) if count % 2 else whole


def crc32c(data: Any, start: int = 0) -> Any:
    """The checksum of bytes behind others whose checksum is `start`. Large parts are computed in
    lanes side by side, whose states are then joined."""
    data = np.frombuffer(data, dtype=np.uint8)
    state = start ^ 0xFFFFFFFF
    length = len(data) // LANES
    if length >= 16:
        columns = np.ascontiguousarray(data[: length * LANES].reshape(LANES, length).T)
        lanes = np.zeros(LANES, dtype=np.uint32)
        for column in columns:
            lanes = TABLE[(lanes ^ column) & np.uint32(255)] ^ (lanes >> np.uint32(8))
        while len(lanes) > 1:
            lanes = _apply(_append_zeros(length), lanes[0::2]) ^ lanes[1::2]
            length *= 2
        state = int(_apply(_append_zeros(length), np.array([state], dtype=np.uint32))[0] ^ lanes[0])
        data = data[length:]
    for byte in data.tolist():
        state = TABLE_LIST[(state ^ byte) & 255] ^ (state >> 8)
    return state ^ 0xFFFFFFFF


class TokenFileWriter:
    """Writes a token file under a temporary name, which publish() changes to its own."""

    def __init__(self, path: Any, tokenizer: Any, flags: Any) -> None:
        self.path = path
        self.temporary = f"{path}.tmp.{os.getpid()}"
        self.tokenizer = tokenizer
        self.flags = flags | PIECES_HAVE_CHECKSUMS
        self.width = 2 if tokenizer.vocab <= 65536 else 4
        self.tokens = self.documents = self.source_bytes = 0
        self.crc = 0
        self.pending = bytearray()
        self.starts = array("Q")
        self.mask, self.mask_bits = bytearray(), 0
        self.pieces = array("I")
        self.file = open(self.temporary, "wb")
        self.file.write(bytes(HEADER_BYTES))

    def add(self, ids: Any, source_bytes: Any, targets: Any = None) -> None:
        """Adds a document with its eos and bos; with a loss mask `targets` tells which ids are."""
        assert (targets is not None) == bool(self.flags & HAS_LOSS_MASK)
        self.starts.append(self.tokens)
        self.pending += array("H" if self.width == 2 else "I", ids).tobytes()
        for t, is_target in enumerate(targets or (), self.tokens):
            if t % 8 == 0:
                self.mask.append(0)
            self.mask[-1] |= bool(is_target) << t % 8
        self.tokens += len(ids)
        self.documents += 1
        self.source_bytes += source_bytes
        while len(self.pending) >= FLUSH_BYTES:
            self._flush(FLUSH_BYTES)

    def _flush(self, count: Any) -> None:
        part = bytes(self.pending[:count])
        del self.pending[:count]
        if part:
            self.pieces.append(crc32c(part))
            self.crc = self._behind(self.crc, self.pieces[-1], len(part))
            self.file.write(part)

    @staticmethod
    def _behind(first: int, second: int, count: int) -> int:
        """The checksum of two parts, of which the second has `count` bytes."""
        return int(_apply(_append_zeros(count), np.array([first], dtype=np.uint32))[0]) ^ second

    def finish(self) -> None:
        self._flush(len(self.pending))
        end = HEADER_BYTES + self.tokens * self.width
        table_offset = (end + 63) // 64 * 64
        self.starts.append(self.tokens)
        table, mask, pieces = self.starts.tobytes(), bytes(self.mask), self.pieces.tobytes()
        mask_offset = table_offset + len(table)
        self.file.write(bytes(table_offset - end) + table + mask + pieces)
        header = struct.pack(
            "<8sIIQQQQIIII32sIIQ", b"MOIETOK1", HEADER_BYTES, self.width, self.tokens, self.documents, HEADER_BYTES,
            table_offset, self.tokenizer.vocab, self.tokenizer.eos, self.tokenizer.bos, self.flags,
            self.tokenizer.identity, self.crc, crc32c(table), self.source_bytes,
        )  # fmt: skip
        header += struct.pack("<I", crc32c(header))
        masked = struct.pack("<IQI", 0, mask_offset, crc32c(mask)) if self.flags & HAS_LOSS_MASK else b""
        header += masked + struct.pack("<I", crc32c(masked)) if masked else bytes(20)
        cut = struct.pack("<QI", mask_offset + len(mask), crc32c(pieces))
        self.file.seek(0)
        self.file.write(header + cut + struct.pack("<I", crc32c(cut)))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def publish(self) -> None:
        os.replace(self.temporary, self.path)
        directory = os.open(os.path.dirname(self.path) or ".", os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def discard(self) -> None:
        """Removes what was written, unless it was published."""
        self.file.close()
        if os.path.exists(self.temporary):
            os.unlink(self.temporary)
