#!/usr/bin/env python3
"""tools/check_wheel.py finds every fault of a wheel, and nothing in one that is right; and
tools/check_stable_abi.py what libraries ask for and give."""

import contextlib
import io
import pathlib
import tempfile
import unittest
import zipfile
from unittest import mock

import fault_tree  # noqa: F401 (which finds tools/, so it comes first)
import check_stable_abi
import check_wheel

NAME = "moiety-0.1.0-py3-none-manylinux_2_35_x86_64.whl"
RIGHT = {**dict.fromkeys(check_wheel.WANTED, ""), "moiety.libs/libdnnl-a4f9d805.so.2.6": "",
         "moiety-0.1.0.dist-info/METADATA": "Requires-Dist: torch>=2.11; extra == 'torch'\n",
         "moiety-0.1.0.dist-info/entry_points.txt": "moiety = moiety._program:main\n"}


def faults_of(name, files):
    with tempfile.TemporaryDirectory() as folder:
        wheel = pathlib.Path(folder) / name
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, text in files.items():
                archive.writestr(path, text)
        with contextlib.redirect_stdout(io.StringIO()):
            return list(check_wheel.faults(wheel))


class CheckWheel(unittest.TestCase):
    def test_a_right_wheel_has_none(self):
        self.assertEqual(faults_of(NAME, RIGHT), [])

    def test_every_fault_is_found(self):
        files = {**RIGHT, "nvidia/cublas/lib/libcublas.so.13": "", "moiety.libs/libgomp.so.1": "",
                 "moiety.libs/libfmt.so.9": "", "moiety.libs/libdnnl.so.2": "", "moiety-0.1.0.dist-info/METADATA": "Requires-Dist: torch>=2.11\n",
                 "moiety-0.1.0.dist-info/entry_points.txt": ""}
        del files["moiety/py.typed"]
        with mock.patch.dict(check_wheel.MOST_MB, cpu=0.001):
            found = "\n".join(faults_of(NAME.replace("py3", "cp311"), files))
        for text in ("is not named", "no moiety/py.typed", "libcublas.so.13 is not ours", "libgomp.so.1 is not ours",
                     "libfmt.so.9 is not ours", "'moiety.libs/libdnnl.so.2'] go by their own names", "requires torch", "no console script",
                     "at most 0.001"):
            self.assertIn(text, found)
        self.assertEqual(found.count("\n"), 8)


class CheckStableAbi(unittest.TestCase):
    def faults(self, undefined, given, needed=("libtorch_cpu.so", "libmoiety.so.0.1"), unique=()):
        symbols = {"operators": (undefined, given["operators"], ()), "core": ([], given["core"], unique)}
        with mock.patch.object(check_stable_abi, "symbols", lambda path: symbols[path.name]), \
                mock.patch.object(check_stable_abi, "needed", lambda path: needed):
            return list(check_stable_abi.faults(pathlib.Path("operators"), pathlib.Path("core")))

    def test_what_is_asked_for_and_given(self):
        ours = ["_ZN6moiety4gemm1fEv", "_ZNK6moiety1A1fEv", "_ZTVN6moiety1AE", "_ZThn8_N6moiety1A1fEv",
                "_ZGVZN6moiety1fEvE1x", "_ZZN6moiety1fEvE1x", "moiety_version"]
        shim = ["aoti_torch_empty_strided", "_ZN6moiety4gemm1fEv", "memcpy@GLIBC_2.14"]
        self.assertEqual(self.faults(shim, {"operators": [], "core": ours}), [])
        found = "\n".join(self.faults([*shim, "_ZN2at5emptyEv"], {
            "operators": ["_ZNSt6vectorIiE1fEv"], "core": [*ours, "ZSTD_compress", "_ZZN8nlohmann1fEvE1x"]},
            ("libc10.so", "libfmt.so.9"), ["_ZN6moiety5kNoneE"]))
        for text in ("_ZN2at5emptyEv, which is neither", "core gives 2 symbols", "ZSTD_compress",
                     "operators gives 1 symbols", "core needs libc10.so", "operators needs libc10.so",
                     "core has 1 symbols that are unique in a process, such as _ZN6moiety5kNoneE",
                     "core needs libfmt.so.9"):
            self.assertIn(text, found)


if __name__ == "__main__":
    unittest.main()
