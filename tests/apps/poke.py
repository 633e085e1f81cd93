"""Changes a weight of a saved checkpoint, so that only its value is wrong. Standard library alone."""
import json
import struct


def crc32c(data, crc=0, table=[]):
    if not table:
        for i in range(256):
            for _ in range(8):
                i = (i >> 1) ^ (0x82F63B78 if i & 1 else 0)
            table.append(i)
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def digest_term(index, bits):
    def mix(z):
        mask = 2**64 - 1
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        return z ^ z >> 31
    return mix((mix((index + 0x9E3779B97F4A7C15) & (2**64 - 1)) + bits) & (2**64 - 1))


def poke(path, tensor, index, value):
    """Sets one float32 of a checkpoint's weight, and all checksums that it is in."""
    with open(f"{path}/manifest.json") as f:
        text = f.read()
    manifest = json.loads(text)
    entry = manifest["tensors"][tensor]
    slot = entry["slots"]["weight"]
    for piece in slot["pieces"]:
        number, start, size, begin, end = piece[:5]
        if all(s <= i < s + n for i, s, n in zip(index, start, size)):
            break
    else:
        raise AssertionError("no piece holds the element")
    file = manifest["files"][number]
    with open(f"{path}/{file['name']}", "r+b") as f:
        data = bytearray(f.read())
        first = 8 + struct.unpack("<Q", data[:8])[0] + begin
        flat = at = 0
        for i, s, n, extent in zip(index, start, size, entry["shape"]):
            flat, at = flat * extent + i, at * n + i - s
        old = bytes(data[first + 4 * at:first + 4 * at + 4])
        new = struct.pack("<f", value)
        data[first + 4 * at:first + 4 * at + 4] = new
        f.seek(0)
        f.write(data)
    change = digest_term(flat, *struct.unpack("<I", new)) - digest_term(flat, *struct.unpack("<I", old))
    for before, after in (
            (piece[5], f"{crc32c(data[first:first + end - begin]):08x}"),
            (file["crc32c"], f"{crc32c(data):08x}"),
            (slot["digest"], f"{(int(slot['digest'], 16) + change) % 2**64:016x}")):
        assert text.count(f'"{before}"') == 1
        text = text.replace(f'"{before}"', f'"{after}"')
    with open(f"{path}/manifest.json", "w") as f:
        f.write(text)
    with open(f"{path}/COMMIT", "w") as f:
        data = text.encode()
        f.write(f"moiety-checkpoint 1 {manifest['id']} {len(data)} {crc32c(data):08x}\n")
